"""One step on one rank with torch: plan → inputs → forward → sampling → result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.interface import AttentionBackend, AttentionVariant, StepRows
from minisgl_backend.config import EngineConfig
from minisgl_backend.device.device import Device, open_device, resolve_dtype
from minisgl_backend.device.host_peak import HostPeak
from minisgl_backend.device.staging import Download, Staging, Upload
from minisgl_backend.device.streams import Event, Later
from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.distributed.seat import ALONE, Seat
from minisgl_backend.errors import ConfigError
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.kvpool.sizing import pages_in, useful_pages
from minisgl_backend.messages.plan import BatchPlan, Logprobs, StepResult
from minisgl_backend.models.limits import check_context_fits
from minisgl_backend.models.load import load_model
from minisgl_backend.models.model import Model
from minisgl_backend.models.size import weight_bytes
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.sampling.draw import PrepareDraw, TorchDraw
from minisgl_backend.sampling.grammar import GrammarSlots
from minisgl_backend.sampling.logprobs import rank_sampled, ranked_size, tell_sampled, who_asks
from minisgl_backend.sampling.masks import Rows, TokenMasks
from minisgl_backend.sampling.no_grammars import NoGrammars
from minisgl_backend.worker.decode_graphs import DecodeGraphs
from minisgl_backend.worker.first_draws import FirstDraws
from minisgl_backend.worker.kernel_choice import KernelChoice, choose_kernels
from minisgl_backend.worker.pending import PendingStep, Told
from minisgl_backend.worker.prompt_logprobs import describe_prompts, tokens_asked
from minisgl_backend.worker.runner import Launched
from minisgl_backend.worker.scratch_plans import largest_plan, prompt_plans, warm_up_plans
from minisgl_backend.worker.slots import SlotState
from minisgl_backend.worker.spoilt import SpoiltSlots
from minisgl_backend.worker.step_columns import StepColumns

_MIB = 1 << 20

Forwarded = tuple[Tensor, tuple[Logprobs, ...]]
"""Logits of the rows that sample, and logprobs of prompts."""


def torch_draw(upload: Upload) -> PrepareDraw:
    """The reference."""
    return TorchDraw()


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
        grammars: GrammarSlots | NoGrammars,
        draw: Callable[[Upload], PrepareDraw] = torch_draw,
        activation_bytes: int = 0,
        group: RankGroup | None = None,
    ) -> None:
        """draw: of what the runner sends arrays with, who draws the tokens. activation_bytes: what the largest step may
        take beside all this, which the warm-up makes sure of. group: the ranks that have the other parts of the model.
        """
        self._model = model
        self._device = device
        self._pool = pool
        self._attention = attention
        self._graphs = graphs
        self._max_running = max_running
        self._context_tokens = context_tokens
        self._token_budget = token_budget
        self._activation_bytes = activation_bytes
        self._grammars = grammars
        self._streams = device.streams
        self._staging = Staging(device.streams)
        self._group = group
        self._tells = group is None or group.rank == 0
        drawing = draw(self._staging.upload)
        self._prepare_draw = drawing if group is None else FirstDraws(drawing, group)
        self._slots = self._fresh_slots()
        self._undrawn: tuple[Rows, PendingStep] | None = None  # the step whose tokens the grammars have not heard of
        self._spoilt = SpoiltSlots(max_running)
        self._last_step = 0

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Recordings, a prompt, then chunks and decode rows together, greedy and sampled, on a GPU prompts of many
        lengths; all on the scratch page.
        """
        assert self._last_step == 0, "warm-up after the first plan"
        if self._graphs is not None:
            self._graphs.warm_up()
        plans = warm_up_plans(*self._scratch_shape())
        if self._device.capability > (0, 0):
            plans += prompt_plans(*self._scratch_shape())
        for plan in plans:
            _result_of(self._launch(plan))
        self._undrawn = None
        self._device.reserve_memory(self._activation_bytes)
        self._pool.clear(torch.tensor([self._pool.scratch_page], device=self._device.torch_device))
        self._slots = self._fresh_slots()

    def launch(self, plan: BatchPlan) -> Launched:
        assert plan.step == self._last_step + 1, f"step {plan.step} after step {self._last_step}"
        self._last_step = plan.step
        void = self._spoilt.void(plan)
        if void is not None:
            return void
        try:
            return self._launch(plan)
        except (torch.OutOfMemoryError, MemoryError) as error:  # of any other error nobody knows what it left behind
            if self._group is not None:  # nor does a rank know how far the others came
                raise
            return self._spoilt.failed(plan, f"out of memory: {error}".splitlines()[0])

    def run(self, plan: BatchPlan) -> StepResult:
        return _result_of(self.launch(plan))

    def run_largest(self) -> None:
        """The largest step there can be, on the scratch page. Before the first plan; the state is then undefined."""
        _result_of(self._launch(largest_plan(*self._scratch_shape(), self._model.spec.vocab_size)))

    @torch.inference_mode()
    def expected_recordings_bytes(self) -> int:
        """What recorded steps will hold. Before the first plan; the scratch page is then undefined."""
        return 0 if self._graphs is None else self._graphs.expected_bytes()

    def close(self) -> None:
        self._device.synchronize()
        self._grammars.close()
        if self._graphs is not None:
            self._graphs.close()
        if self._group is not None:
            self._group.close()
        del self._model, self._graphs, self._attention, self._pool, self._slots

    @torch.inference_mode()
    def _launch(self, plan: BatchPlan) -> Launched:
        """What the host must do of a step, and all of it on the device: forward, then draw."""
        self._slots.admit(plan.admissions)
        self._slots.grant(plan.grants)
        if not plan.row_slots:
            self._begin_masks(plan, np.zeros(0, np.int64))
            return StepResult(plan.step, ())
        columns = StepColumns.of(plan)
        self._slots.check_rows(columns.slots, columns.starts, columns.lengths)
        slots, positions = columns.slots[columns.sampled], columns.ends[columns.sampled]
        asked = tokens_asked(self._slots, columns.slots, columns.starts, columns.lengths)
        parameters, rules = self._slots.sampling.take(slots), self._slots.rules.of(slots, positions)
        tensors = self._upload(plan, columns, self._slots.expect(slots, positions))

        behind = self._undrawn is not None and self._streams.ahead
        filling = None if behind else self._begin_masks(plan, slots)
        forward = self._streams.compute(lambda: self._forward(columns, tensors, asked))
        if behind:  # a mask needs the token of the step before, which is not there before this forward is under way
            filling = self._begin_masks(plan, slots)
        masks = filling.result() if filling is not None else None
        draw_tokens = self._prepare_draw(parameters, positions, rules, masks)

        def draw() -> Tensor:
            chosen = draw_tokens(forward.value[0])
            self._slots.store(tensors.places, chosen)
            return chosen

        if not len(slots):
            return self._pending(plan, slots, self._streams.mark(), lambda: ((), forward.value[1]))
        drawn = self._streams.compute(draw)
        tokens = self._staging.download(drawn, (len(slots),), torch.int64)
        return self._pending(plan, slots, tokens, self._telling(parameters.logprobs, positions, forward, drawn))

    def _telling(
        self, best: Rows, positions: Rows, forward: Later[Forwarded], drawn: Later[Tensor]
    ) -> Callable[[], Told]:
        """Launches the ranking of the rows that tell so many of the best → tells, when it is asked."""
        asked, vocab = who_asks(best, self._slots.vocab), self._slots.vocab
        if not asked or not self._tells:
            return lambda: ((), forward.value[1])
        rows = self._staging.upload([rows for rows, _ in asked])
        ranked = self._staging.download(
            self._streams.compute(lambda: rank_sampled(forward.value[0], drawn.value, asked, rows)),
            (ranked_size(asked, vocab),),
            torch.int32,
        )
        return lambda: (tell_sampled(ranked.tensor(), asked, vocab, positions), forward.value[1])

    def _pending(self, plan: BatchPlan, slots: Rows, tokens: Download | Event, tell: Callable[[], Told]) -> Launched:
        pending = PendingStep(plan.step, tokens, tell)
        self._undrawn = slots, pending
        return pending if self._streams.ahead else pending.result()

    def _upload(self, plan: BatchPlan, columns: StepColumns, places: Rows) -> _StepTensors:
        cleared = [grant.pages[-1] for grant in plan.grants]  # the row ends in it; those before it are full
        arrays = (
            columns.slots,
            columns.token_slots,
            columns.token_positions,
            columns.last_tokens,
            np.array(cleared, np.int64),
            places,
        )
        return _StepTensors(*self._staging.upload(arrays))

    def _forward(self, columns: StepColumns, tensors: _StepTensors, asked: Rows) -> Forwarded:
        """On the device: writes keys and values → logits of the rows that sample, logprobs of prompts."""
        if len(tensors.cleared):
            self._pool.clear(tensors.cleared)
        positions = tensors.token_positions
        tokens = self._slots.tokens_at(tensors.token_slots, positions)
        tables = self._slots.tables_of(tensors.slots, int(columns.ends.max()))
        if self._graphs is not None and columns.decodes and not asked.any():
            logits = self._graphs.logits(tokens, positions, tables, columns.starts)
            if logits is not None:
                return logits, ()
        attention = self._attention.begin(StepRows(columns.starts, columns.lengths, tables))
        if not asked.any():
            return self._model.forward(tokens, positions, attention, tensors.last_tokens), ()
        hidden, head = self._model.hidden(tokens, positions, attention), self._model.head
        told = describe_prompts(self._slots, columns.slots, columns.starts, columns.firsts, asked, hidden, head)
        return head(hidden[tensors.last_tokens]), told

    def _begin_masks(self, plan: BatchPlan, slots: Rows) -> Future[TokenMasks] | None:
        """For the rows that sample, after their grammars have been told what the step before has drawn: that is waited
        for, but only where there are grammars.
        """
        if self._undrawn is not None and not self._grammars.idle:
            drawn_slots, step = self._undrawn
            self._grammars.drew(drawn_slots, step.tokens())
        self._undrawn = None
        self._grammars.admit(plan.admissions)
        return self._grammars.begin(slots)

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
            self._staging,
        )


@dataclass(frozen=True, slots=True)
class _StepTensors:
    """What the device must know of a step, int64: columns of StepColumns, and more."""

    slots: Tensor
    token_slots: Tensor
    token_positions: Tensor
    last_tokens: Tensor
    cleared: Tensor  # pages that a row begins to write
    places: Tensor  # see SlotState.expect


def _result_of(launched: Launched) -> StepResult:
    return launched if isinstance(launched, StepResult) else launched.result()


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
    seat: Seat = ALONE,
) -> TorchRunner:
    """See build_runner."""
    grammars = GrammarSlots(token_bytes, spec.vocab_size) if seat.rank == 0 else NoGrammars()
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
        group = kernels.group(seat)
        host_peak = HostPeak()
        model = load_model(
            spec, folder, device.torch_device, dtype, context_tokens, config.quantization, kernels.load(), group
        )
        spec = model.spec  # of this rank's part
        progress(_weights_line(weight_bytes(model), host_peak.bytes()))
        variants = attention_variants(spec)
        shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)

        def runner(num_pages: int, activation_bytes: int, kernels: KernelChoice) -> TorchRunner:
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
                draw=kernels.draw,
                activation_bytes=activation_bytes,
                group=group,
            )

        quiet = replace(kernels, progress=lambda line: None)
        num_pages, peak = _choose_pages(config, shape, device, context_tokens, seat.ranks, lambda: runner(0, 0, quiet))
        size = num_pages * shape.bytes_per_page(config.page_size) // _MIB
        progress(f"{num_pages} KV pages of {config.page_size} tokens, {size} MiB")
        if line := _windows_line(spec, shape, context_tokens):
            progress(line)
        return runner(num_pages, peak, kernels)


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
    config: EngineConfig,
    shape: KvShape,
    device: Device,
    context_tokens: int,
    ranks: int,
    scratch: Callable[[], TorchRunner],
) -> tuple[int, int]:
    """Pages of the pool, by the setting or by what the device can spare beside weights, activations and recordings.
    Also what activations were reckoned at, in bytes; 0 with the setting, and where nobody meters them.

    ranks: that take their share of the device's memory. scratch: makes a runner that has no page but the scratch page.
    """
    page_bytes = shape.bytes_per_page(config.page_size)
    if config.kv_bytes:
        free, whose = device.free_memory_bytes(), f" on each of {ranks} ranks" if ranks > 1 else ""
        if config.kv_bytes * ranks > free:
            raise ConfigError(
                f"setting 'kv_bytes' is {config.kv_bytes:,}{whose}, but {device.name} has {free:,} bytes free"
            )
        return pages_in(config.kv_bytes, page_bytes, source=f"setting 'kv_bytes' = {config.kv_bytes:,}"), 0
    useful_bytes = useful_pages(config.max_running, context_tokens, config.page_size) * page_bytes
    held = scratch().expected_recordings_bytes()
    peak = device.peak_memory_bytes(lambda: scratch().run_largest())
    budget = device.kv_pool_bytes(
        utilization=config.gpu_memory_utilization, peak_bytes=peak + held, useful_bytes=useful_bytes * ranks
    )  # of all ranks: they look at the same memory
    return pages_in(budget // ranks, page_bytes, source=f"the free memory of {device.name}"), peak
