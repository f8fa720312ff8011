//! Timing primitives: each launch by events, many launches by graph replay, with cold or warm caches, and what the
//! clock itself costs.

use std::time::Duration;

use cudarc::driver::sys;

use crate::{
    Device, DeviceBuffer, Event, Graph, Result, Stream,
    driver::{check, plain},
};

/// Times `repeats` runs of `work`, each between two events. `before` runs before each, outside the time: it flushes the
/// cache or rotates the inputs, and gets the number of the run.
pub fn time_each_us(
    stream: &Stream,
    repeats: usize,
    limit: Duration,
    what: &str,
    mut before: impl FnMut(usize) -> Result<()>,
    mut work: impl FnMut(usize) -> Result<()>,
) -> Result<Vec<f64>> {
    let mut events = Vec::with_capacity(repeats);
    for run in 0..repeats {
        let (start, end) = (Event::new(stream)?, Event::new(stream)?);
        before(run)?;
        start.record(stream)?;
        work(run)?;
        end.record(stream)?;
        events.push((start, end));
    }
    if let Some((_, last)) = events.last() {
        last.wait(limit, what)?;
    }
    events.iter().map(|(start, end)| end.elapsed_us(start)).collect()
}

/// Times `repeats` replays of a graph that holds `launches` launches; each sample is the time of one launch.
pub fn time_graph_us(
    graph: &Graph,
    stream: &Stream,
    launches: usize,
    repeats: usize,
    limit: Duration,
    what: &str,
) -> Result<Vec<f64>> {
    let replay = |_| graph.launch(stream);
    let times = time_each_us(stream, repeats, limit, what, |_| Ok(()), replay)?;
    Ok(times.into_iter().map(|time_us| time_us / launches.max(1) as f64).collect())
}

/// What two events with nothing between them say: the median of a hundred pairs. Every sample holds this much.
pub fn event_overhead_us(stream: &Stream, limit: Duration) -> Result<f64> {
    let mut times = time_each_us(stream, 100, limit, "empty event pairs", |_| Ok(()), |_| Ok(()))?;
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Bytes per nanosecond that copying a buffer of this size within the device moves, read and written: the best of several.
pub fn copy_gbps(device: &Device, stream: &Stream, bytes: usize, limit: Duration) -> Result<f64> {
    let (from, to) = (device.alloc(bytes)?, device.alloc(bytes)?);
    from.fill(0x3c, stream)?;
    let times = time_each_us(
        stream,
        20,
        limit,
        "copy within the device",
        |_| Ok(()),
        |_| to.copy_within_device(&from, stream),
    )?;
    let best_us = times.into_iter().fold(f64::INFINITY, f64::min);
    Ok(2.0 * bytes as f64 / best_us / 1e3)
}

impl Device {
    /// Gives every persisting line of L2 back and lets none be set aside again: a kernel that keeps
    /// its inputs there would look as if it read nothing.
    pub fn reset_persisting_l2(&self) -> Result<()> {
        self.context.bind()?;
        let limit = sys::CUlimit::CU_LIMIT_PERSISTING_L2_CACHE_SIZE;
        // SAFETY: the context is current.
        check("cuCtxSetLimit", unsafe { sys::cuCtxSetLimit(limit, 0) }, plain)?;
        // SAFETY: the context is current.
        check("cuCtxResetPersistingL2Cache", unsafe { sys::cuCtxResetPersistingL2Cache() }, plain)
    }
}

/// A buffer twice the size of L2; writing it drives everything else out.
#[derive(Debug)]
pub struct L2Flush {
    device: Device,
    buffer: DeviceBuffer,
}

impl L2Flush {
    /// Allocates the buffer.
    pub fn new(device: &Device) -> Result<Self> {
        let bytes = usize::try_from(2 * device.info().l2_bytes).unwrap_or(usize::MAX);
        Ok(Self { device: device.clone(), buffer: device.alloc(bytes)? })
    }

    /// Drives everything else out of the cache, persisting lines included, in the stream's order.
    pub fn flush(&self, stream: &Stream) -> Result<()> {
        self.device.reset_persisting_l2()?;
        self.buffer.fill(0, stream)
    }
}

/// How many copies of a working set to rotate through so that none is still in L2 when its turn
/// comes again: all copies but one must not fit.
pub fn copies_to_exceed_l2(working_set_bytes: u64, l2_bytes: u64) -> usize {
    let beyond = l2_bytes / working_set_bytes.max(1) + 2;
    usize::try_from(beyond).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::copies_to_exceed_l2;

    #[test]
    fn rotation_never_meets_a_cached_copy() {
        for (bytes, l2) in [(1, 10), (3, 10), (10, 10), (11, 10), (1000, 10)] {
            let copies = copies_to_exceed_l2(bytes, l2) as u64;
            assert!((copies - 1) * bytes > l2, "{copies} copies of {bytes}");
            assert!(copies == 2 || (copies - 2) * bytes <= l2, "{copies} copies of {bytes} are too many");
        }
    }
}
