//! What can go wrong in a call.

/// Why attention was not computed. Nothing has been written then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem or its tensors are not right.
    #[error(transparent)]
    Problem(#[from] evosdpa_core::Error),
    /// The CPU backend refused.
    #[error(transparent)]
    Cpu(#[from] evosdpa_cpu::Error),
}
