//! A mistake that every lane makes in every round is put into words once: what a launch allocates does not grow with it.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use ptxsan::{Arg, Device, Kind, Launch, Module};

/// The system's allocator, counting. The only test of this program is the one below, so nothing else allocates.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller keeps the promises that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above, and `at` came from there.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Each round reads shared, local and global memory where there is none, and global memory across a boundary of words; then all
/// lanes write to one place.
const KERNEL: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 place, .param .u32 rounds)
{
.local .align 4 .b8 own[16];
.reg .pred %p;
.reg .b32 %i, %n, %v, %s, %t;
.reg .b64 %a, %o, %b;
ld.param.u64 %b, [place];
mov.u32 %t, %tid.x;
ld.param.u32 %n, [rounds];
mov.u32 %i, 0;
mov.u32 %s, 1048576;
mov.u64 %a, 4096;
mov.u64 %o, 8192;
L:
ld.shared.u32 %v, [%s];
ld.local.u32 %v, [%o];
ld.global.u32 %v, [%a];
ld.global.u32 %v, [%a+2];
st.global.u32 [%b], %t;
add.u32 %i, %i, 1;
setp.lt.u32 %p, %i, %n;
@%p bra L;
ret;
}";

#[test]
fn a_mistake_made_again_and_again_is_put_into_words_once() {
    let module = Module::parse(KERNEL).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let place = device.allocate("place", 4).unwrap();
    let mut allocations = |rounds: u32| {
        let mut launch =
            Launch::new("k", [1, 1, 1], [32, 1, 1], 0, vec![Arg::Buffer(place), Arg::U32(rounds)]);
        launch.options.parallel = false;
        let before = ALLOCATIONS.load(Relaxed);
        let outcome = device.launch(id, &launch).unwrap();
        let allocations = ALLOCATIONS.load(Relaxed) - before;
        let kinds: Vec<Kind> = outcome.findings.iter().map(|finding| finding.kind).collect();
        let outside = [Kind::OutOfBounds; 3];
        assert_eq!(kinds, [&outside[..], &[Kind::Misaligned, Kind::Race]].concat(), "{outcome}");
        assert!(outcome.findings.iter().all(|finding| finding.count >= u64::from(rounds)), "{outcome}");
        allocations
    };
    let (few, many) = (allocations(1), allocations(1_000));
    // More than 100,000 occurrences; each in words would be several allocations.
    assert!(many < few + 1_000, "{few} allocations for one round, {many} for a thousand");
}
