"""One step on one rank with torch: plan → inputs → forward → sampling → result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.attention.interface import AttentionBackend, AttentionVariant, StepRows
from minisgl_backend.config import EngineConfig
from minisgl_backend.device.device import Device, open_device, resolve_dtype
from minisgl_backend.device.host_peak import HostPeak
from minisgl_backend.errors import ConfigError
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.kvpool.sizing import pages_in, useful_pages
from minisgl_backend.messages.plan import BatchPlan, Logprobs, StepResult
from minisgl_backend.models.limits import check_context_fits
from minisgl_backend.models.load import load_model
from minisgl_backend.models.model import Model
from minisgl_backend.models.size import weight_bytes
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.sampling.draw import draw_tokens
from minisgl_backend.sampling.grammar import GrammarSlots
from minisgl_backend.sampling.logprobs import describe_sampled
from minisgl_backend.sampling.masks import Rows, TokenMasks
from minisgl_backend.worker.decode_graphs import DecodeGraphs
from minisgl_backend.worker.kernel_choice import choose_kernels
from minisgl_backend.worker.prompt_logprobs import describe_prompts, tokens_asked
from minisgl_backend.worker.scratch_plans import largest_plan, warm_up_plans
from minisgl_backend.worker.slots import SlotState
from minisgl_backend.worker.spoilt import SpoiltSlots

_MIB = 1 << 20


class TorchRunner:
    """See StepRunner. Takes over model and pool, which is that of `attention`."""

    def __init__(
        self,
        model: Model,
        device: Device,
        pool: PagedKvPool,
        *,
        attention: AttentionBackend,
        graphs: DecodeGraphs | None = None,
        max_running: int,
        context_tokens: int,
        token_budget: int,
        grammars: GrammarSlots,
    ) -> None:
        self._model = model
        self._device = device
        self._pool = pool
        self._attention = attention
        self._graphs = graphs
        self._max_running = max_running
        self._context_tokens = context_tokens
        self._token_budget = token_budget
        self._grammars = grammars
        self._slots = self._fresh_slots()
        self._spoilt = SpoiltSlots(max_running)
        self._last_step = 0

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @torch.inference_mode()
    def warm_up(self) -> None:
        """A prompt, then chunks and decode rows together, greedy and sampled, all on the scratch page."""
        assert self._last_step == 0, "warm-up after the first plan"
        for plan in warm_up_plans(*self._scratch_shape()):
            self._step(plan)
        self._pool.clear([self._pool.scratch_page])
        self._slots = self._fresh_slots()

    def run(self, plan: BatchPlan) -> StepResult:
        assert plan.step == self._last_step + 1, f"step {plan.step} after step {self._last_step}"
        self._last_step = plan.step
        void = self._spoilt.void(plan)
        if void is not None:
            return void
        try:
            return self._step(plan)
        except (torch.OutOfMemoryError, MemoryError) as error:  # of any other error nobody knows what it left behind
            return self._spoilt.failed(plan, f"out of memory: {error}".splitlines()[0])

    def run_largest(self) -> None:
        """The largest step there can be, on the scratch page. Before the first plan; the state is then undefined."""
        self._step(largest_plan(*self._scratch_shape(), self._model.spec.vocab_size))

    def close(self) -> None:
        self._device.synchronize()
        self._grammars.close()
        if self._graphs is not None:
            self._graphs.close()
        del self._model, self._graphs, self._attention, self._pool, self._slots

    @torch.inference_mode()
    def _step(self, plan: BatchPlan) -> StepResult:
        self._slots.admit(plan.admissions)
        self._grammars.admit(plan.admissions)
        self._slots.grant(plan.grants)
        if not plan.row_slots:
            return StepResult(plan.step, ())
        slots, starts, lengths, samples = _columns(plan)
        self._slots.check_rows(slots, starts, lengths)
        if plan.grants:  # the row ends in the last page of its grant; those before it are full
            self._pool.clear([grant.pages[-1] for grant in plan.grants])
        to = self._device.torch_device

        row_ends = np.cumsum(lengths)
        row_of_token = np.repeat(np.arange(len(slots)), lengths)
        positions = np.arange(row_ends[-1]) + (starts - row_ends + lengths)[row_of_token]
        token_slots = torch.from_numpy(slots[row_of_token]).to(to)
        token_positions = torch.from_numpy(positions).to(to)
        tokens = self._slots.tokens_at(token_slots, token_positions)
        tables = self._slots.tables_of(torch.from_numpy(slots).to(to), int((starts + lengths).max()))

        sampled = np.flatnonzero(samples)
        filling = self._grammars.begin(slots[sampled])
        asked = tokens_asked(self._slots, slots, starts, lengths)
        prompts: tuple[Logprobs, ...] = ()
        logits = None
        if self._graphs is not None and len(sampled) == len(tokens) and not asked.any():  # decode rows alone
            logits = self._graphs.logits(tokens, token_positions, tables, starts)
        if logits is None:
            attention = self._attention.begin(StepRows(starts, lengths, tables))
            last_tokens = torch.from_numpy(row_ends[sampled] - 1).to(to)
            if asked.any():
                hidden = self._model.hidden(tokens, token_positions, attention)
                firsts, head = row_ends - lengths, self._model.head
                prompts = describe_prompts(self._slots, slots, starts, firsts, asked, hidden, head)
                logits = head(hidden[last_tokens])
            else:
                logits = self._model.forward(tokens, token_positions, attention, last_tokens)
        if not len(sampled):
            self._device.synchronize()
            return StepResult(plan.step, (), prompt_logprobs=prompts)
        chosen, logprobs = self._draw(logits, slots[sampled], (starts + lengths)[sampled], filling)
        tokens_drawn = tuple(chosen.tolist())
        self._grammars.drew(slots[sampled], tokens_drawn)
        return StepResult(plan.step, tokens_drawn, "", logprobs, prompts)

    def _draw(
        self, logits: Tensor, slots: Rows, positions: Rows, filling: Future[TokenMasks] | None
    ) -> tuple[Tensor, tuple[Logprobs, ...]]:
        """logits [rows, vocab] of the rows that sample the tokens at `positions` of `slots` → the tokens, which are the
        slots' own from now on, and what is told of them.
        """
        parameters = self._slots.sampling.take(slots)
        rules = self._slots.rules.of(slots, positions)
        masks = filling.result() if filling is not None else None
        chosen = draw_tokens(logits, parameters, positions, rules, masks)
        self._slots.append(slots, positions, chosen)
        if (parameters.logprobs < 0).all():
            return chosen, ()
        return chosen, describe_sampled(logits, chosen, parameters.logprobs, positions)

    def _scratch_shape(self) -> tuple[int, int, int, int, int]:
        pool = self._pool
        return self._max_running, self._context_tokens, self._token_budget, pool.page_size, pool.scratch_page

    def _fresh_slots(self) -> SlotState:
        return SlotState(
            self._max_running,
            self._context_tokens,
            self._pool.page_size,
            self._pool.scratch_page,
            self._model.spec.vocab_size,
            self._device.torch_device,
        )


def attention_variants(spec: ModelSpec) -> tuple[AttentionVariant, ...]:
    """How each layer attends."""
    return tuple(
        AttentionVariant(spec.attention_scale, layer.window, spec.attention_softcap, spec.attention_sinks)
        for layer in spec.layers
    )


def build_torch_runner(
    config: EngineConfig,
    spec: ModelSpec,
    folder: Path,
    context_tokens: int,
    progress: Callable[[str], None],
    token_bytes: Callable[[], Sequence[bytes]],
) -> TorchRunner:
    """See build_runner."""
    grammars = GrammarSlots(token_bytes, spec.vocab_size)
    grammars.warm()
    device = open_device(config.device, config.threads)
    dtype = resolve_dtype(device, config.dtype, getattr(torch, spec.dtype))
    check_context_fits(config, spec, context_tokens, device.free_memory_bytes())
    kept = "" if config.quantization == "none" else f", quantization {config.quantization}"
    kernels = choose_kernels(config, device, progress)
    progress(f"loading weights on {device.name} in {str(dtype).removeprefix('torch.')}{kept}{kernels.told}")
    if dtype == torch.float16 and spec.dtype == "bfloat16":
        progress("warning: a bf16 model in fp16 can overflow, and requests then fail; dtype auto or bf16 does not")
    with torch.inference_mode():
        host_peak = HostPeak()
        with_kernels = kernels.load()
        model = load_model(spec, folder, device.torch_device, dtype, context_tokens, config.quantization, with_kernels)
        progress(_weights_line(weight_bytes(model), host_peak.bytes()))
        variants = attention_variants(spec)
        shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)

        def runner(num_pages: int) -> TorchRunner:
            pool = PagedKvPool(shape, num_pages, config.page_size, device.torch_device)
            attention = kernels.attention(pool, variants, spec.num_heads)
            table_pages = -(-context_tokens // config.page_size)
            return TorchRunner(
                model,
                device,
                pool,
                attention=attention,
                graphs=kernels.graphs(model, attention, config.max_running, table_pages, pool.scratch_page),
                max_running=config.max_running,
                context_tokens=context_tokens,
                token_budget=config.token_budget,
                grammars=grammars,
            )

        num_pages = _choose_pages(config, shape, device, context_tokens, runner)
        size = num_pages * shape.bytes_per_page(config.page_size) // _MIB
        progress(f"{num_pages} KV pages of {config.page_size} tokens, {size} MiB")
        if line := _windows_line(spec, shape, context_tokens):
            progress(line)
        return runner(num_pages)


def _windows_line(spec: ModelSpec, shape: KvShape, context_tokens: int) -> str:
    """What the pool keeps although no layer that it belongs to can see it; empty where there is no such thing.

    A page holds its tokens in all layers and is freed as a whole: the cache does not know of windows.
    """
    windows = [layer.window for layer in spec.layers if 0 < layer.window < context_tokens]
    if not windows:
        return ""
    token_bytes = shape.bytes_per_page(1)
    unseen_bytes = token_bytes // spec.num_layers * len(windows)
    lengths = " or ".join(f"{window:,}" for window in sorted(set(windows)))
    return (
        f"{len(windows)} of {spec.num_layers} layers see the last {lengths} tokens; what they no longer see is kept all"
        f" the same: {unseen_bytes:,} of {token_bytes:,} bytes a token"
    )


def _weights_line(weights: int, peak: int | None) -> str:
    """peak: of main memory; mapped weights come into it when they are first used, so it may be below them."""
    line = f"weights: {weights // _MIB} MiB"
    return line if peak is None else f"{line}, at the peak of loading {peak // _MIB} MiB of main memory"


def _choose_pages(
    config: EngineConfig, shape: KvShape, device: Device, context_tokens: int, runner: Callable[[int], TorchRunner]
) -> int:
    """Pages of the pool, by the setting or by what the device can spare next to weights and activations."""
    page_bytes = shape.bytes_per_page(config.page_size)
    if config.kv_bytes:
        free = device.free_memory_bytes()
        if config.kv_bytes > free:
            raise ConfigError(f"setting 'kv_bytes' is {config.kv_bytes:,}, but {device.name} has {free:,} bytes free")
        return pages_in(config.kv_bytes, page_bytes, source=f"setting 'kv_bytes' = {config.kv_bytes:,}")
    useful_bytes = useful_pages(config.max_running, context_tokens, config.page_size) * page_bytes
    peak = device.peak_memory_bytes(lambda: runner(0).run_largest())
    budget = device.kv_pool_bytes(utilization=config.gpu_memory_utilization, peak_bytes=peak, useful_bytes=useful_bytes)
    return pages_in(budget, page_bytes, source=f"the free memory of {device.name}")


def _columns(plan: BatchPlan) -> tuple[npt.NDArray[np.int64], ...]:
    columns = (plan.row_slots, plan.row_starts, plan.row_lengths, plan.row_samples)
    return tuple(np.asarray(column, np.int64) for column in columns)
