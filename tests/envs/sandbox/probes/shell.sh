set -e
cd /workspace
printf 'b 2\na 1\nc 3\n' > data
sort data | awk '{print $2}' | tr '\n' ' '
grep -c '[ab]' data
sed -n 's/^c /found /p' data
find . -name data -type f | xargs wc -l
cp data other; echo d 4 >> other; diff data other || true
tar czf all.tar.gz data other && tar tzf all.tar.gz
head -1 data | tee copy | cut -d' ' -f1
seq 3 | paste -sd+ | sed 's/$/;/'
sh -c 'echo from sh'
echo é | grep -o . ; ls /workspace | sort -r | head -1
date +%Z; basename "$(command -v python3)"; python -c 'print("python")'
