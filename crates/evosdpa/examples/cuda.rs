//! Attention on an NVIDIA GPU: device addresses and a stream in, a launch out.
//!
//! The memory may be anybody's: PyTorch's, cudarc's, or as here of `evosdpa-cuda`.
//!
//! `cargo run --release -p evosdpa --example cuda`

use std::time::Instant;

use evosdpa::{Attention, DType, Device, DeviceTensors, Error, Problem, gpu};

fn main() -> Result<(), Error> {
    // Two sequences, 32 query heads that share 8 key/value heads, 4,096 queries and keys, head dimension 128.
    let problem = Problem::new("b2h32/8s4096d128:causal".parse()?, DType::BF16)?;
    let start = Instant::now();
    let attention = Attention::plan(problem, Device::Cuda(0))?;
    println!(
        "{problem} on {}: {} (planned in {:?})",
        attention.device(),
        attention.variant(),
        start.elapsed()
    );

    let gpu = gpu::shared(0)?;
    // Ones in bf16: every output is then one, too.
    let ones = |shape: [usize; 4]| -> Result<_, Error> {
        let host = vec![0x3f80_u16; shape.iter().product()];
        let mut buffer = gpu.device().alloc(2 * host.len())?;
        buffer.copy_from(&host)?;
        Ok(buffer)
    };
    let (q, k, v) = (ones(problem.q_shape())?, ones(problem.k_shape())?, ones(problem.v_shape())?);
    let mut host = vec![0_u16; problem.o_shape().iter().product()];
    let o = gpu.device().alloc(2 * host.len())?;
    let addresses = [q.address(), k.address(), v.address(), o.address()];
    let tensors = DeviceTensors::packed(&problem, addresses, None);

    let stream = gpu.device().stream()?;
    for _ in 0..3 {
        let start = Instant::now();
        // SAFETY: the addresses are the buffers above, which live until the stream has come past the launch.
        unsafe { attention.run_on(stream.number(), &tensors) }?;
        let queued = start.elapsed();
        stream.synchronize()?;
        println!("queued in {queued:?}, done after {:?}", start.elapsed());
    }
    o.copy_to(&mut host)?;
    println!("all outputs are one: {}", host.iter().all(|bits| *bits == 0x3f80));
    Ok(())
}
