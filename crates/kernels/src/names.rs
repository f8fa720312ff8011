//! "Did you mean …".

pub(crate) use evosdpa_core::error::nearest;

/// `; did you mean `x`?`, or nothing: for the end of an error message.
pub(crate) fn suggestion(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or(String::new(), |name| format!("; did you mean `{name}`?"))
}
