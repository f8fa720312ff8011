//! Hopper's asynchronous instructions: mbarriers, bulk copies and their tensor maps, `wgmma`, clusters.
//!
//! Every copy and every group of products is an agent of its own. What it touches is held against everybody's accesses when it is
//! issued; when it happens is the schedule's choice. Others know of it from the phase, group or wait that it completes on, and not
//! before.

pub(super) mod barrier_state;
pub(super) mod bulk;
pub(super) mod cluster;
pub(super) mod flight;
pub(super) mod mbarrier;
pub(super) mod stores;
pub(super) mod tensor_map;
pub(super) mod wgmma;
