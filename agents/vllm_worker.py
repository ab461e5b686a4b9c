"""What vLLM's worker processes can do beside their own: load another set of weights, whole."""

from typing import Any

EXTENSION = f"{__name__}.WeightLoading"


class WeightLoading:
    """Mixed into vLLM's worker class (``worker_extension_cls``), and called through ``collective_rpc``."""

    reload_weights: Any  # of vLLM's worker
    model_runner: Any
    vllm_config: Any

    def toolgym_load(self, folder: str) -> None:
        """Load the safetensors of a folder in the place of the model's weights.

        Args:
            folder: of the same architecture.
        """
        try:
            self.reload_weights(weights_path=folder)
        except BaseException:  # whatever it was, it goes on to whoever asked
            self._toolgym_tidy()
            raise
        self._toolgym_repack()

    def _toolgym_tidy(self) -> None:
        """Give all layers their tensors back after a load that failed.

        Without this the next load would count what this one has read, and take layers for complete too early.
        """
        from vllm.config import set_current_vllm_config  # noqa: PLC0415 - heavy
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: PLC0415 - heavy

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)

    def _toolgym_repack(self) -> None:
        """Renew what vLLM's CPU kernels keep of output layers.

        They multiply by a packed copy. A layer whose weights are tied to the embedding's has no weights of its own to
        load, so vLLM's reload leaves that copy as it was: logits of new hidden states under old weights.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: PLC0415 - heavy
            VocabParallelEmbedding,
        )

        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
