//! Any text is read as a shape or refused; what is read prints back to the same shape.
#![no_main]

use evosdpa_core::Shape;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(shapes) = Shape::parse_list(text) {
        for shape in shapes {
            let again: Shape = shape.to_string().parse().expect("a printed shape is read back");
            assert_eq!(shape, again);
        }
    }
});
