"""Times attention by PyTorch, and by libraries that build on it, for evosdpa.

Runs behind ``requests.py``.
"""

import contextlib
import ctypes
import importlib
import sys
import time

def read_tensor(torch, description):
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[description["dtype"]]
    with open(description["path"], "rb") as file:
        flat = torch.frombuffer(bytearray(file.read()), dtype=dtype)
    return torch.as_strided(flat, description["shape"], description["strides"])


def band_mask(torch, seq_q, seq_kv, lo, hi):
    distance = torch.arange(seq_kv)[None, :] - torch.arange(seq_q)[:, None]
    return (distance >= lo) & (distance <= hi)


class Absent(Refusal):
    """A library that is not installed, or cannot be imported."""


def imported(*names):
    """The first of these modules that is installed."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as problem:
            # A module that is there but lacks one of its own is broken, not absent.
            if problem.name is None or not (name + ".").startswith(problem.name + "."):
                raise Absent(f"{name} cannot be imported: {problem}") from problem
        except Exception as problem:
            raise Absent(f"{name} cannot be imported: {type(problem).__name__}: {problem}") from problem
    raise Absent(f"{' or '.join(names)} is not installed in {sys.executable}")


class Problem:
    """What is asked, in the words of libraries other than PyTorch: masks count from the last query and the last key."""

    UNBOUNDED = 1 << 29

    def __init__(self, request, query, key):
        self.scale = request["scale"]
        self.batch, self.heads, self.seq_q, self.dim = query.shape
        self.kv_heads, self.seq_kv = key.shape[1:3]
        past = self.seq_kv - self.seq_q
        self.left = None if request["lo"] < -self.UNBOUNDED else past - request["lo"]
        self.right = None if request["hi"] > self.UNBOUNDED else request["hi"] - past
        self.full = self.left is None and self.right is None
        self.causal = self.left is None and self.right == 0

    def window(self):
        """FlashAttention's window: -1 is unbounded."""
        sides = [-1 if side is None else side for side in (self.left, self.right)]
        if any(side is not None and side < 0 for side in (self.left, self.right)):
            raise NotImplementedError("its windows hold the diagonal of the last query and the last key; this mask does not")
        return tuple(sides)


class FlashAttention:
    """FlashAttention 2 or 3: [batch, tokens, heads, dim]."""

    def __init__(self, *modules):
        self.module = imported(*modules)

    def prepare(self, problem, tensors):
        return [tensor.transpose(1, 2) for tensor in tensors]

    def call(self, problem, tensors):
        options = {"softmax_scale": problem.scale}
        if problem.causal:
            options["causal"] = True
        elif not problem.full:
            options["window_size"] = problem.window()
        output = self.module.flash_attn_func(*tensors, **options)
        # Some versions return the log-sum-exp as well.
        output = output[0] if isinstance(output, (tuple, list)) else output
        return output.transpose(1, 2)


class FlashInfer:
    """FlashInfer's prefill over packed tokens: [tokens, heads, dim]."""

    WORKSPACE_BYTES = 256 << 20

    def __init__(self):
        self.module = imported("flashinfer")
        self.planned = None

    def prepare(self, problem, tensors):
        return [tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in tensors]

    def plan(self, problem, query):
        import torch

        if not (problem.full or problem.causal):
            raise NotImplementedError("of its masks only full and causal, counted from the last query and key, are asked for")
        workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
        wrapper = self.module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = torch.arange(problem.batch + 1, dtype=torch.int32, device=query.device)
        wrapper.plan(
            starts * problem.seq_q,
            starts * problem.seq_kv,
            problem.heads,
            problem.kv_heads,
            problem.dim,
            causal=problem.causal,
            sm_scale=problem.scale,
            q_data_type=query.dtype,
        )
        return wrapper

    def call(self, problem, tensors):
        if self.planned is None or self.planned[0] is not problem:
            self.planned = problem, self.plan(problem, tensors[0])
        output = self.planned[1].run(*tensors)
        return output.unflatten(0, (problem.batch, problem.seq_q)).transpose(1, 2)


class Xformers:
    """xformers: [batch, tokens, groups, heads of a group, dim]."""

    def __init__(self):
        self.module = imported("xformers.ops")

    def prepare(self, problem, tensors):
        group = problem.heads // problem.kv_heads
        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        if group == 1:
            return [query, key, value]
        shared = [tensor.unsqueeze(3).expand(-1, -1, -1, group, -1) for tensor in (key, value)]
        return [query.unflatten(2, (problem.kv_heads, group)), *shared]

    def bias(self, problem):
        masks = self.module.fmha.attn_bias
        if problem.full:
            return None
        if problem.causal:
            return masks.LowerTriangularFromBottomRightMask()
        raise NotImplementedError("of its masks only full and causal, counted from the last query and key, are asked for")

    def call(self, problem, tensors):
        output = self.module.memory_efficient_attention(*tensors, attn_bias=self.bias(problem), scale=problem.scale)
        output = output.flatten(2, 3) if output.ndim == 5 else output
        return output.transpose(1, 2)


class Sequences:
    """What lengths and pages mean: of every sequence its block and rows of Q, and of each key its row in the cache."""

    def __init__(self, torch, side, problem, tensors):
        query, key, _ = tensors
        self.problem, self.side = problem, side
        self.page = key.shape[2] if side["page_table"] else None
        self.q_tokens, self.batch = query.shape[2], side["batch"]
        cu_q, cu_k = side["cu_seqlens_q"], side["cu_seqlens_kv"]
        self.queries, self.keys = [], []
        for b in range(self.batch):
            first, end = cu_q[b : b + 2] if cu_q else (0, query.shape[2])
            if side["seqused_q"]:
                end = first + side["seqused_q"][b]
            self.queries.append((0 if cu_q else b, first, end))
            room = (cu_k[b], cu_k[b + 1]) if cu_k else (0, side["seq_kv"])
            filled = side["seqused_kv"][b] if side["seqused_kv"] else room[1] - room[0]
            padding = side["leftpad_kv"][b] if side["leftpad_kv"] else 0
            block = side["cache_batch_idx"][b] if side["cache_batch_idx"] else b
            self.keys.append((0 if cu_k else block, room[0] + padding, room[0] + filled))

    def visible(self, torch, b, device):
        """Which keys of sequence b its queries see; ``None`` for all, True for torch's causal mask."""
        queries, keys = (end - first for _, first, end in (self.queries[b], self.keys[b]))
        lo, hi, diagonal = self.side["lo"], self.side["hi"], keys - queries if self.side["bottom_right"] else 0
        if lo < -Problem.UNBOUNDED and hi == 0 and diagonal == 0:
            return True
        mask = band_mask(torch, queries, keys, lo + diagonal, hi + diagonal)
        if not bool(mask.any(1).all()):
            raise NotImplementedError("queries that see no key are not asked of it")
        return None if bool(mask.all()) else mask.to(device)

    def output(self, torch, tensors):
        query, _, value = tensors
        return torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype, device=query.device)


class Looped:
    """SDPA of one sequence after the other; pages are gathered first, since nothing in it reads them."""

    def __init__(self):
        self.torch = imported("torch")

    def prepare(self, sequences, tensors):
        torch, device = self.torch, tensors[0].device
        plan = []
        for b in range(sequences.batch):
            (_, first, end), (block, key_first, key_end) = sequences.queries[b], sequences.keys[b]
            if end > first and key_end > key_first:
                pages = None
                if sequences.page:
                    size = sequences.page
                    pages = torch.tensor(sequences.side["page_table"][block][key_first // size : -(-key_end // size)], device=device)
                plan.append((b, pages, sequences.visible(torch, b, device)))
        return tensors, plan, sequences.output(torch, tensors)

    def call(self, sequences, prepared):
        (query, key, value), plan, out = prepared
        attention = self.torch.nn.functional.scaled_dot_product_attention
        for b, pages, mask in plan:
            (q_block, q_first, q_end), (block, first, end) = sequences.queries[b], sequences.keys[b]
            rows = query[q_block : q_block + 1, :, q_first:q_end]
            if pages is None:
                k, v = (x[block : block + 1, :, first:end] for x in (key, value))
            else:
                skipped = first - first % sequences.page
                k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, first - skipped : end - skipped] for x in (key, value))
            options = {"is_causal": True} if mask is True else {"attn_mask": mask}
            options["enable_gqa"] = query.shape[1] != key.shape[1]
            out[q_block : q_block + 1, :, q_first:q_end] = attention(rows, k, v, scale=sequences.problem.scale, **options)
        return out


class Nested:
    """SDPA of nested tensors: packed queries and keys, as many of both, heads of their own."""

    def __init__(self):
        self.torch = imported("torch")

    def prepare(self, sequences, tensors):
        torch, side = self.torch, sequences.side
        if not (side["cu_seqlens_q"] and side["cu_seqlens_kv"]) or side["seqused_q"] or side["seqused_kv"] or side["leftpad_kv"]:
            raise NotImplementedError("nested tensors are packed queries and keys, all of them in use")
        if tensors[0].shape[1] != tensors[1].shape[1]:
            raise NotImplementedError("nested tensors do not share key/value heads")
        causal = side["lo"] < -Problem.UNBOUNDED and side["hi"] == 0
        full = side["lo"] < -Problem.UNBOUNDED and side["hi"] > Problem.UNBOUNDED
        if not full and not (causal and (side["cu_seqlens_q"] == side["cu_seqlens_kv"] or not side["bottom_right"])):
            raise NotImplementedError("of masks nested tensors have torch's causal one")
        nested = []
        for tensor, cu in zip(tensors, (side["cu_seqlens_q"], *[side["cu_seqlens_kv"]] * 2)):
            offsets = torch.tensor(cu, device=tensor.device)
            values = tensor[0].transpose(0, 1)[: cu[-1]].contiguous()
            lengths = [end - first for first, end in zip(cu, cu[1:])]
            jagged = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths))
            nested.append(jagged.transpose(1, 2))
        return nested, causal, sequences.output(torch, tensors)

    def call(self, sequences, prepared):
        nested, causal, out = prepared
        attention = self.torch.nn.functional.scaled_dot_product_attention
        values = attention(*nested, is_causal=causal, scale=sequences.problem.scale).transpose(1, 2).values()
        if values.shape[0] == out.shape[2]:
            return values.transpose(0, 1)[None]
        out[0, :, : values.shape[0]] = values.transpose(0, 1)
        return out


class Flex:
    """FlexAttention, compiled on a GPU: documents, filled lengths and pages by a mask over the places of keys in the cache. The
    mask's blocks are counted beforehand."""

    def __init__(self):
        self.torch = imported("torch")
        self.module = imported("torch.nn.attention.flex_attention")
        # Where it is not compiled it need not be traced either.
        self.module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
        self.compiled = None

    def prepare(self, sequences, tensors):
        torch, side, device = self.torch, sequences.side, tensors[0].device
        query, key, value = tensors
        if sequences.page:
            key, value = (x.transpose(0, 1).flatten(1, 2)[None].contiguous() for x in (key, value))
        keys = key.shape[2]
        # Of every place in a block of Q, and in a block of the cache: its sequence and its number there; -1: none.
        blocks = query.shape[0]
        q_owner = torch.full((blocks, query.shape[2]), -1, dtype=torch.int32)
        q_number = torch.zeros_like(q_owner)
        owner = torch.full((sequences.batch, keys), -1, dtype=torch.int32)
        counts = [0] * sequences.batch
        for b, ((q_block, first, end), (block, key_first, key_end)) in enumerate(zip(sequences.queries, sequences.keys)):
            q_owner[q_block, first:end] = b
            q_number[q_block, first:end] = torch.arange(end - first, dtype=torch.int32)
            counts[b] = key_end - key_first - (end - first) if side["bottom_right"] else 0
            numbers = torch.arange(key_end - key_first, dtype=torch.int32)
            places = numbers + key_first
            if sequences.page:
                pages = torch.tensor(side["page_table"][block], dtype=torch.int64)
                places = pages[places // sequences.page] * sequences.page + places % sequences.page
            owner[b, places.long()] = numbers
        if side["cache_batch_idx"] and not sequences.page:
            raise NotImplementedError("sequences that choose their block of a cache are not asked of it")
        diagonal = torch.tensor(counts, dtype=torch.int32, device=device)
        q_owner, q_number, owner = (x.to(device) for x in (q_owner, q_number, owner))
        lo, hi = side["lo"], side["hi"]

        def mask(b, h, q, kv):
            sequence = q_owner[b, q]
            number = owner[sequence.clamp(min=0), kv]
            distance = number - q_number[b, q] - diagonal[sequence.clamp(min=0)]
            return (sequence >= 0) & (number >= 0) & (distance >= lo) & (distance <= hi)

        block_mask = self.module.create_block_mask(mask, blocks, None, query.shape[2], keys, device=str(device))
        return (query, key, value), block_mask

    def call(self, sequences, prepared):
        tensors, block_mask = prepared
        attention = self.module.flex_attention
        if tensors[0].is_cuda:
            self.compiled = self.compiled or self.torch.compile(attention, dynamic=False)
            attention = self.compiled
        shared = tensors[0].shape[1] != tensors[1].shape[1]
        return attention(*tensors, block_mask=block_mask, scale=sequences.problem.scale, enable_gqa=shared)


class FlashAttention3(FlashAttention):
    """FlashAttention 3, whose packages have a packed form too: packed [tokens, heads, dim], caches [blocks or pages, tokens,
    heads, dim] with filled lengths. vLLM's has no dense one; fa3-fwd is its forward from PyPI, without windows and pages."""

    MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface", "vllm.vllm_flash_attn.flash_attn_interface")

    def __init__(self):
        super().__init__(*self.MODULES)
        self.of_vllm = not hasattr(self.module, "flash_attn_func")

    def prepare(self, problem, tensors):
        if isinstance(problem, Sequences):
            return self.prepare_packed(problem, tensors)
        if self.of_vllm:
            raise NotImplementedError("vLLM's build has packed sequences and caches alone")
        return super().prepare(problem, tensors)

    def prepare_packed(self, sequences, tensors):
        import torch

        side, (query, key, value) = sequences.side, tensors
        if side["seqused_q"] or side["leftpad_kv"] or side["cache_batch_idx"]:
            raise NotImplementedError("used queries, left padding and chosen blocks are not asked of it")
        lengths = [[end - first for _, first, end in of] for of in (sequences.queries, sequences.keys)]
        lo, hi = side["lo"], side["hi"]
        if not side["bottom_right"] and (lo >= -Problem.UNBOUNDED or hi <= Problem.UNBOUNDED) and lengths[0] != lengths[1]:
            raise NotImplementedError("its masks count from the last query and key; this one does not")
        words = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=query.device)  # noqa: E731
        by_token = lambda x: x.transpose(1, 2).contiguous()  # noqa: E731
        starts = side["cu_seqlens_q"] or [b * query.shape[2] for b in range(sequences.batch + 1)]
        given = {"q": by_token(query).flatten(0, 1)[: starts[-1]], "cu_seqlens_q": words(starts), "max_seqlen_q": max(lengths[0])}
        keys, values = by_token(key), by_token(value)
        if side["cu_seqlens_kv"]:
            end = side["cu_seqlens_kv"][-1]
            given |= {"k": keys[0, :end], "v": values[0, :end], "cu_seqlens_k": words(side["cu_seqlens_kv"])}
            given |= {"max_seqlen_k": max(lengths[1])}
        filled = None if side["cu_seqlens_kv"] and not side["seqused_kv"] else words(lengths[1])
        table = words([[max(page, 0) for page in row] for row in side["page_table"]]) if sequences.page else None
        if self.of_vllm:
            given |= {"max_seqlen_k": max(lengths[1]), "seqused_k": filled, "block_table": table, "fa_version": 3}
            given |= {} if side["cu_seqlens_kv"] else {"k": keys, "v": values}
        elif side["cu_seqlens_kv"]:
            given |= {"seqused_k": filled}
        else:
            given |= {"k_cache": keys, "v_cache": values, "cache_seqlens": filled, "page_table": table}
        given |= {"softmax_scale": sequences.problem.scale, "causal": lo < -Problem.UNBOUNDED and hi == 0}
        if not given["causal"]:
            sides = (-lo if lo >= -Problem.UNBOUNDED else -1, hi if hi <= Problem.UNBOUNDED else -1)
            given["window_size"] = list(sides) if self.of_vllm else sides
        return given, sequences.output(torch, tensors)

    def call(self, problem, prepared):
        if not isinstance(problem, Sequences):
            return super().call(problem, prepared)
        given, out = prepared
        name = "flash_attn_with_kvcache" if "k_cache" in given else "flash_attn_varlen_func"
        found = getattr(self.module, name)(**given)
        found = found[0] if isinstance(found, (tuple, list)) else found
        blocks, _, rows, _ = out.shape
        if found.shape[0] == blocks * rows:
            return found.unflatten(0, (blocks, rows)).transpose(1, 2)
        out[0, :, : found.shape[0]] = found.transpose(0, 1)
        return out


class OnnxRuntime:
    """The Attention operator of ONNX, on the processor: a session of one node."""

    OPSET, IR_VERSION = 23, 11

    def __init__(self):
        self.torch, self.onnx, self.runtime = imported("torch"), imported("onnx"), imported("onnxruntime")

    def prepare(self, problem, tensors):
        if tensors[0].dtype == self.torch.bfloat16:
            raise NotImplementedError("its Attention has no bf16 on a processor")
        if not (problem.full or problem.causal):
            raise NotImplementedError("of its masks only full and causal are asked for")
        if problem.causal and problem.seq_q != problem.seq_kv:
            raise NotImplementedError("its causal mask is counted from the first query and key; this one is not")
        helper, types = self.onnx.helper, self.onnx.TensorProto
        dtype = types.FLOAT if tensors[0].dtype == self.torch.float32 else types.FLOAT16
        inputs = [helper.make_tensor_value_info(name, dtype, tensor.shape) for name, tensor in zip("qkv", tensors)]
        outputs = [helper.make_tensor_value_info("o", dtype, None)]
        node = helper.make_node("Attention", list("qkv"), ["o"], is_causal=int(problem.causal), scale=problem.scale)
        graph = helper.make_graph([node], "attention", inputs, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.OPSET)], ir_version=self.IR_VERSION)
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = self.torch.get_num_threads()
        # Idle workers must not take the cores of whoever is timed next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = self.runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session, {name: tensor.contiguous().numpy() for name, tensor in zip("qkv", tensors)}

    def call(self, problem, prepared):
        session, tensors = prepared
        return self.torch.from_numpy(session.run(None, tensors)[0])


# Those that are asked for problems whose sequences have lengths or pages of their own.
SERVING = {"looped": Looped, "nested": Nested, "flex": Flex}

# Those that have a form for either kind.
BOTH = {"flash-attn-3"}

# By the backend's name in requests.
LIBRARIES = {
    "flash-attn-3": FlashAttention3,
    "flash-attn-2": lambda: FlashAttention("flash_attn"),
    "flashinfer": FlashInfer,
    "xformers": Xformers,
    "onnxruntime": OnnxRuntime,
    **SERVING,
}


class Session:
    """One problem at a time, on one device, by any of PyTorch's backends or a library."""

    # One sample on a GPU is the mean of calls for about this long, and of no more than so many: as of kernels (timed.rs).
    SAMPLE_US = 300
    SAMPLE_CALLS_MAX = 80

    def __init__(self, torch):
        self.torch = torch
        self.device = "cpu"
        self.sets = []
        self.sides = None
        self.options = {}
        self.libraries = {}
        self.problem = None
        self.prepared = {}
        self.graphs = {}
        self.eager_calls = None
        self.foreign = None
        self.output = None

    def load(self, request):
        self.device = request["device"]
        self.graphs = {}
        self.prepared = {}
        self.eager_calls = None
        self.sets = [[read_tensor(self.torch, t).to(self.device) for t in tensors] for tensors in request["sets"]]
        query, key, _ = self.sets[0]
        self.problem = Problem(request, query, key)
        self.sides = request.get("sides")
        self.options = {"scale": request["scale"]}
        if query.shape[1] != key.shape[1]:
            self.options["enable_gqa"] = True
        if request["mask"] == "causal":
            self.options["is_causal"] = True
        elif request["mask"] == "band":
            mask = band_mask(self.torch, query.shape[2], key.shape[2], request["lo"], request["hi"])
            self.options["attn_mask"] = mask.to(self.device)
        return {}

    def find(self, request):
        """Says why a backend is not there, if it is not."""
        name = request["backend"]
        if name in LIBRARIES and name not in self.libraries:
            self.libraries[name] = LIBRARIES[name]()
        return {}

    def call(self, number, backend):
        number %= len(self.sets)
        if backend not in BOTH and (backend in SERVING) != (self.sides is not None):
            raise NotImplementedError(f"it is asked for {'packed and paged' if backend in SERVING else 'dense'} problems")
        if backend in LIBRARIES:
            library = self.libraries[backend]
            if backend not in self.prepared:
                self.prepared[backend] = [self.prepare(library, number) for number in range(len(self.sets))]
            question, prepared = self.prepared[backend][number]
            return library.call(question, prepared)
        query, key, value = self.sets[number]
        attention = self.torch.nn.functional.scaled_dot_product_attention
        return attention(query, key, value, **self.options)

    def prepare(self, library, number):
        question, tensors = self.problem, self.sets[number]
        if self.sides is not None:
            question = Sequences(self.torch, self.sides[number], self.problem, tensors)
        return question, library.prepare(question, tensors)

    def backend(self, name):
        if name == "default" or name in LIBRARIES:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backends = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH,
        }
        return sdpa_kernel(backends[name])

    def time(self, request):
        with self.backend(request["backend"]):
            if self.device == "cpu":
                start = time.perf_counter_ns()
                self.output = self.call(request["set"], request["backend"])
                return {"time_us": (time.perf_counter_ns() - start) / 1e3}
            if request["graph"]:
                return {"time_us": self.time_graph(request["backend"], request["between"])}
            return {"time_us": self.time_eager(request["backend"])}

    def calls_of_a_sample(self, call_us):
        """Whole turns through the input sets, so that every set is used equally often."""
        wanted = min(max(int(self.SAMPLE_US / call_us), 1), self.SAMPLE_CALLS_MAX)
        return -(-wanted // len(self.sets)) * len(self.sets)

    def time_eager(self, backend):
        """What a program that calls PyTorch in a loop sees: host and device together."""

        def time_calls(calls):
            self.torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for number in range(calls):
                self.output = self.call(number, backend)
            self.torch.cuda.synchronize()
            return (time.perf_counter_ns() - start) / 1e3 / calls

        if self.eager_calls is None:
            time_calls(1)
            self.eager_calls = self.calls_of_a_sample(time_calls(len(self.sets)))
        return time_calls(self.eager_calls)

    def time_graph(self, backend, between):
        """The device alone: calls captured in a CUDA graph over all input sets; with a foreign kernel before each, whose own
        time is subtracted, if asked to (as timed.rs does)."""
        if (backend, between) not in self.graphs:
            self.call(0, backend)
            few = self.capture(len(self.sets), lambda number: self.call(number, backend))
            self.replay(few)
            calls = self.calls_of_a_sample(self.replay(few))
            if between:
                if self.foreign is None:
                    self.foreign = self.torch.zeros(1 << 16, device=self.device)
                both = self.capture(calls, lambda number: (self.foreign.add_(1.0), self.call(number, backend)))
                self.graphs[backend, between] = both, self.capture(calls, lambda _: self.foreign.add_(1.0))
            else:
                self.graphs[backend, between] = self.capture(calls, lambda number: self.call(number, backend)), None
        graph, foreign = self.graphs[backend, between]
        time_us = self.replay(graph)
        return time_us - self.replay(foreign) if foreign else time_us

    def capture(self, calls, call):
        """A graph of so many calls, with an output to keep."""
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            outputs = [call(number) for number in range(calls)]
        return graph, calls, outputs[-1]

    def replay(self, captured):
        """The share of one call."""
        graph, calls, _ = captured
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    def save(self, request):
        with self.backend(request["backend"]):
            output = self.call(0, request["backend"])
        packed = output.contiguous().cpu()
        with open(request["path"], "wb") as file:
            file.write(ctypes.string_at(packed.data_ptr(), packed.numel() * packed.element_size()))
        return {}


serve(Session)
