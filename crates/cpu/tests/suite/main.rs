//! One suite for both kernels and every instruction set of this machine.

mod correctness;
mod extremes;
mod kinds;
mod promises;
mod running;
mod weights;
