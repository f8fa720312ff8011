//! Any text is read as PTX or refused, and what is read runs to its end or to the end of its budget.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ptxsan::{Arg, Device, Launch, Module};

fuzz_target!(|text: &str| {
    let Ok(module) = Module::parse(text) else { return };
    let entries: Vec<String> = module.entries().map(str::to_owned).collect();
    for entry in entries.iter().take(2) {
        let mut device = Device::new();
        let Ok(id) = device.load(&module) else { return };
        let buffer = device.upload("buffer", &[1; 4096]).expect("a page fits");
        let sizes = module.parameters(entry).expect("the entry is there");
        let args = sizes
            .into_iter()
            .map(|bytes| match bytes {
                8 => Arg::Buffer(buffer),
                4 => Arg::I32(3),
                n => Arg::Bytes(vec![0; n]),
            })
            .collect();
        // Half a warp too many, or two warpgroups with room for mbarriers and tiles.
        let (threads, shared) = if text.contains("sm_90a") { (256, 16 * 1024) } else { (48, 64) };
        let mut launch = Launch::new(entry, [2, 1, 1], [threads, 1, 1], shared, args);
        launch.options.instruction_budget = 5_000;
        launch.options.parallel = false;
        let _ = device.launch(id, &launch);
        for point in module.sync_points(entry).expect("the entry is there").iter().take(2) {
            let _ = module.without(point.id);
        }
    }
});
