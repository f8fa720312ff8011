//! A problem with its data as the library's description of it: what goes to device memory, and what lies where there.

use evosdpa::{
    DeviceDense, DeviceIndices, DeviceLse, DevicePages, DeviceScales, DeviceSide, DeviceTensor,
    DeviceTensors, DeviceTokens,
};
use evosdpa_core::{Problem, TensorView};
use evosdpa_oracle::inputs::Inputs;

/// What a kernel reads: each name with its bytes.
pub(super) fn buffers(inputs: &Inputs) -> Vec<(&'static str, &[u8])> {
    fn bytes<T: bytemuck::NoUninit>(values: Option<&[T]>) -> Option<&[u8]> {
        values.map(bytemuck::cast_slice)
    }
    let side = inputs.side();
    let named = [
        ("Q", Some(inputs.q.bytes())),
        ("K", Some(inputs.k.bytes())),
        ("V", Some(inputs.v.bytes())),
        ("the scales of Q", bytes(side.scales.q)),
        ("the scales of K", bytes(side.scales.k)),
        ("the scales of V", bytes(side.scales.v)),
        ("the cumulative query lengths", bytes(side.cu_seqlens_q)),
        ("the cumulative key lengths", bytes(side.cu_seqlens_kv)),
        ("the used key lengths", bytes(side.seqused_kv)),
        ("the used query lengths", bytes(side.seqused_q)),
        ("the left paddings", bytes(side.leftpad_kv)),
        ("the cache batch indices", bytes(side.cache_batch_idx)),
        ("the page table", bytes(side.page_table.map(|table| table.entries))),
        ("the ALiBi slopes", bytes(side.alibi_slopes)),
        ("the sinks", bytes(side.sinks)),
        ("the bias", inputs.side.bias.as_ref().map(|bias| bias.bytes())),
        ("the mask", inputs.side.mask.as_ref().map(|mask| mask.bytes())),
        ("the block table", inputs.side.blocks.as_ref().map(|blocks| blocks.bytes())),
    ];
    named.into_iter().filter_map(|(name, bytes)| Some((name, bytes?))).collect()
}

/// The tensors of a call: inputs where `place` says that the buffers of these names are, and the output with these strides.
pub(super) fn tensors(
    problem: &Problem,
    inputs: &Inputs,
    place: &dyn Fn(&str) -> Option<u64>,
    (o, o_address): (TensorView<'_>, u64),
    lse: Option<u64>,
) -> DeviceTensors {
    let at = |name: &str| place(name).unwrap_or(0);
    let tensor = |view: TensorView<'_>, address| {
        let [batch, head, seq, _] = view.strides();
        DeviceTensor { address, strides: [batch as i64, head as i64, seq as i64] }
    };
    let given = inputs.side();
    let dense = |view: Option<TensorView<'_>>, name: &str| {
        view.map(|view| DeviceDense {
            address: at(name),
            dtype: view.dtype(),
            strides: tensor(view, 0).strides,
        })
    };
    let blocks = inputs.k.view().shape()[0];
    let rows = given.page_table.map_or(blocks, |table| table.rows(problem.pages_per_sequence()));
    let tokens = |name: &str, tokens| place(name).map(|cu_seqlens| DeviceTokens { cu_seqlens, tokens });
    DeviceTensors {
        q: tensor(inputs.q.view(), at("Q")),
        k: tensor(inputs.k.view(), at("K")),
        v: tensor(inputs.v.view(), at("V")),
        o: tensor(o, o_address),
        lse: lse.map(|address| DeviceLse::packed(address, problem)),
        scales: inputs.scales.is_some().then(|| DeviceScales {
            q: at("the scales of Q"),
            k: at("the scales of K"),
            v: at("the scales of V"),
        }),
        side: DeviceSide {
            queries: tokens("the cumulative query lengths", inputs.q.view().shape()[2]),
            keys: tokens("the cumulative key lengths", inputs.k.view().shape()[2]),
            seqused_kv: place("the used key lengths"),
            seqused_q: place("the used query lengths"),
            leftpad_kv: place("the left paddings"),
            indices: place("the cache batch indices").map(|address| DeviceIndices { address, rows }),
            pages: given.page_table.map(|table| DevicePages {
                table: at("the page table"),
                row_stride: table.row_stride as i64,
                pages: blocks,
            }),
            alibi_slopes: place("the ALiBi slopes"),
            bias: dense(given.bias, "the bias"),
            mask: dense(given.mask, "the mask"),
            blocks: place("the block table"),
            sinks: place("the sinks"),
        },
    }
}
