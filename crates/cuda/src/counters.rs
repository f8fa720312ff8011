//! What launches share: work counters, and workspaces ([`Workspaces`]).
//!
//! A work counter is a 32-bit word of device memory for each launch that hands its work out while it runs.
//!
//! A kernel gets one that is 0 and leaves it at 0, so that nobody has to clear it before the next launch.

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicU32, Ordering},
};

use cudarc::driver::sys;

use crate::{
    Device, DeviceBuffer, Error, RawStream, RelaxedCapture, Result, Stream,
    device::Context,
    driver::{check, plain},
    workspace::Workspaces,
};

/// Counters for launches as they come, and as many again for launches that are captured. A power of two: the ring goes on
/// without a jump where its number of turns overflows.
const COUNT: u32 = 1 << 15;

/// Bytes of a counter.
const COUNTER_BYTES: u32 = 4;

/// Neighbouring launches are this far apart in memory, so that two that run at the same time do not meet in a cache line.
const LINE_BYTES: u32 = 128;

/// Cache lines of each kind of counters.
const LINES: u32 = COUNT * COUNTER_BYTES / LINE_BYTES;

/// Counters of one device, in memory that is made when it is first needed.
///
/// Launches as they come walk through a ring of 32,768 counters. That is safe because two launches share one only if they
/// were queued exactly 32,768 launches apart, or a multiple of that, and it does harm only if both run at the same time. On
/// one stream they never do. On two, one launch would have to wait or run while the other stream comes through all those
/// between, each of which fills the device for tens of microseconds, and then run beside precisely that one.
///
/// A launch that is captured into a graph has a counter that is never given to another, because the graph may be replayed
/// at any time beside other launches. After 32,768 captured launches there are none left, and a kernel without one divides
/// its work up beforehand. A graph does not run beside itself; one that is instantiated twice, or is part of two others,
/// has the same counters in both, so those must not run at the same time.
#[derive(Debug)]
pub struct Counters {
    context: Arc<Context>,
    memory: OnceLock<DeviceBuffer>,
    /// Only one thread makes the memory.
    making: Mutex<()>,
    turns: Turns,
    /// Where blocks of one launch meet.
    workspaces: Workspaces,
}

impl Counters {
    /// Counters of this device, which take no memory yet.
    pub fn new(device: &Device) -> Self {
        Self::of(&device.context)
    }

    pub(crate) fn of(context: &Arc<Context>) -> Self {
        Self {
            context: Arc::clone(context),
            memory: OnceLock::new(),
            making: Mutex::default(),
            turns: Turns::default(),
            workspaces: Workspaces::of(context),
        }
    }

    /// Makes the memory unless it is there: no launch does. The caller's thread may be capturing a graph.
    pub(crate) fn prepare(&self) -> Result<()> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if self.memory.get().is_some() {
            return Ok(());
        }
        let entered = self.context.enter()?;
        let _relaxed = RelaxedCapture::begin(&entered)?;
        let memory = DeviceBuffer::alloc(&self.context, (2 * COUNT * COUNTER_BYTES) as usize)?;
        // A stream of its own: the default stream would wait for streams that are being captured, which breaks them.
        let stream = Stream::create(&self.context)?;
        memory.fill(0, &stream)?;
        stream.synchronize()?;
        // Nobody else has set it: the lock is held.
        let _ = self.memory.set(memory);
        Ok(())
    }

    pub(crate) fn is_of(&self, context: &Context) -> bool {
        self.context.is_same_as(context)
    }

    /// The address of a counter for the next launch on this stream, which must be one of the current context; 0 when there
    /// is none left.
    pub(crate) fn next(&self, stream: RawStream) -> Result<u64> {
        let Some(memory) = self.memory.get() else { return Ok(0) };
        let turn = if is_captured(stream)? { self.turns.captured() } else { Some(self.turns.as_it_comes()) };
        Ok(turn.map_or(0, |turn| memory.address() + u64::from(offset_bytes(turn))))
    }

    /// Makes a workspace for a launch that is captured, unless there is one.
    pub(crate) fn prepare_workspace(&self, bytes: u64) -> Result<()> {
        self.workspaces.prepare(bytes)
    }

    /// The address of a workspace for the next launch on this stream, as [`Counters::next`].
    pub(crate) fn workspace(&self, stream: RawStream, bytes: u64) -> Result<u64> {
        self.workspaces.next(stream, bytes)
    }

    /// Gives the counters and workspaces of captured launches out again, from the first. For whoever has these counters to itself, when no
    /// graph that captured one of them is left.
    pub fn reuse_captured(&self) {
        self.turns.reuse_captured();
        self.workspaces.reuse_captured();
    }

    /// Whether every counter is 0, as the kernels must leave them. Ask when no launch is under way.
    pub fn check(&self, kernel: &str) -> Result<()> {
        let mut values = Vec::new();
        if let Some(memory) = self.memory.get() {
            values.resize(2 * COUNT as usize, 0_u32);
            memory.copy_to(&mut values)?;
        }
        match values.iter().filter(|value| **value != 0).count() + self.workspaces.left()? {
            0 => Ok(()),
            count => Err(Error::CountersLeft { kernel: kernel.to_owned(), count }),
        }
    }
}

/// Which counter is whose turn: those below `COUNT` for launches as they come, those from there on for captured ones.
#[derive(Debug, Default)]
struct Turns {
    as_they_come: AtomicU32,
    captured: AtomicU32,
}

impl Turns {
    fn as_it_comes(&self) -> u32 {
        self.as_they_come.fetch_add(1, Ordering::Relaxed) % COUNT
    }

    fn captured(&self) -> Option<u32> {
        let one_more = |given: u32| (given < COUNT).then_some(given + 1);
        let given = self.captured.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        given.ok().map(|given| COUNT + given)
    }

    fn reuse_captured(&self) {
        self.captured.store(0, Ordering::Relaxed);
    }
}

/// Where a turn's counter is: every turn has the next cache line, and only when each line of its kind has one counter do
/// they get a second.
fn offset_bytes(turn: u32) -> u32 {
    let (kind, turn) = (turn / COUNT, turn % COUNT);
    (kind * LINES + turn % LINES) * LINE_BYTES + turn / LINES * COUNTER_BYTES
}

/// Whether what the stream is given now goes into a graph.
fn is_captured(stream: RawStream) -> Result<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is alive: the launch that follows needs that too; the driver writes one value.
    let code = unsafe { sys::cuStreamIsCapturing(stream.0 as sys::CUstream, &mut status) };
    check("cuStreamIsCapturing", code, plain)?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn launches_as_they_come_walk_round_a_ring() {
        let turns = Turns::default();
        let first: Vec<u32> = (0..COUNT).map(|_| turns.as_it_comes()).collect();
        let second: Vec<u32> = (0..COUNT).map(|_| turns.as_it_comes()).collect();
        assert_eq!(first.iter().collect::<HashSet<_>>().len(), COUNT as usize);
        assert_eq!(first, second);
        // Where the number of turns overflows, too.
        let turns = Turns { as_they_come: AtomicU32::new(u32::MAX), ..Turns::default() };
        assert_eq!([turns.as_it_comes(), turns.as_it_comes(), turns.as_it_comes()], [COUNT - 1, 0, 1]);
    }

    #[test]
    fn a_captured_launch_has_its_counter_to_itself_until_there_are_none() {
        let turns = Turns::default();
        let ring: HashSet<u32> = (0..COUNT).map(|_| turns.as_it_comes()).collect();
        let captured: HashSet<u32> = (0..COUNT).map_while(|_| turns.captured()).collect();
        assert_eq!(captured.len(), COUNT as usize);
        assert!(ring.is_disjoint(&captured));
        for _ in 0..3 {
            assert_eq!(turns.captured(), None);
        }
        assert!(ring.contains(&turns.as_it_comes()));
        turns.reuse_captured();
        assert_eq!(turns.captured(), Some(COUNT));
    }

    #[test]
    fn threads_never_share_a_captured_counter() {
        let turns = Turns::default();
        // More than there are, but not for ever.
        let take_all = || -> Vec<u32> { (0..COUNT + 1).map_while(|_| turns.captured()).collect() };
        let taken: Vec<u32> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take_all)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(taken.len(), COUNT as usize);
        assert_eq!(taken.iter().collect::<HashSet<_>>().len(), COUNT as usize);
    }

    #[test]
    fn every_turn_has_a_word_of_its_own_and_neighbours_have_lines_of_their_own() {
        let offsets: Vec<u32> = (0..2 * COUNT).map(offset_bytes).collect();
        assert_eq!(offsets.iter().collect::<HashSet<_>>().len(), offsets.len());
        let end = 2 * COUNT * COUNTER_BYTES;
        assert!(offsets.iter().all(|offset| offset % COUNTER_BYTES == 0 && *offset < end));
        let lines: Vec<u32> = offsets.iter().map(|offset| offset / LINE_BYTES).collect();
        for near in lines.windows(64) {
            assert_eq!(near.iter().collect::<HashSet<_>>().len(), near.len());
        }
        // Captured launches are replayed beside others: no line has counters of both kinds.
        let (ring, captured) = lines.split_at(COUNT as usize);
        assert!(ring.iter().collect::<HashSet<_>>().is_disjoint(&captured.iter().collect()));
    }
}
