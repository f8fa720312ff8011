//! Tests of the scalar functions against models written on another principle.

mod approx;
mod bits;
mod convert;
mod half;
mod model;
mod rounding;

pub(crate) use crate::random::Random;
