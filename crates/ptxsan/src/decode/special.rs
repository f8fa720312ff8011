//! Special registers that are fixed for the life of a warp.

/// A special register, filled in when a warp starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    NumWarps,
    SmId,
    NumSms,
    GridId,
    LaneMaskEq,
    LaneMaskLe,
    LaneMaskLt,
    LaneMaskGe,
    LaneMaskGt,
    DynamicSharedBytes,
    TotalSharedBytes,
    Clusterid(u8),
    Nclusterid(u8),
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    ClusterRank,
    ClusterSize,
    IsCluster,
    /// Of the system: 1 and 2 are the halves of the address of a cooperative launch's workspace.
    EnvReg(u8),
}

impl Special {
    /// The register of that name and component; `None` if there is no such one.
    pub(super) fn named(name: &str, component: Option<&str>) -> Option<Special> {
        let axis = match component {
            Some("x") => Some(0),
            Some("y") => Some(1),
            Some("z") => Some(2),
            _ => None,
        };
        Some(match (name, axis) {
            ("%tid", Some(axis)) => Special::Tid(axis),
            ("%ntid", Some(axis)) => Special::Ntid(axis),
            ("%ctaid", Some(axis)) => Special::Ctaid(axis),
            ("%nctaid", Some(axis)) => Special::Nctaid(axis),
            ("%clusterid", Some(axis)) => Special::Clusterid(axis),
            ("%nclusterid", Some(axis)) => Special::Nclusterid(axis),
            ("%cluster_ctaid", Some(axis)) => Special::ClusterCtaid(axis),
            ("%cluster_nctaid", Some(axis)) => Special::ClusterNctaid(axis),
            _ if component.is_some() => return None,
            ("%laneid", _) => Special::LaneId,
            ("%warpid", _) => Special::WarpId,
            ("%nwarpid", _) => Special::NumWarps,
            ("%smid", _) => Special::SmId,
            ("%nsmid", _) => Special::NumSms,
            ("%gridid", _) => Special::GridId,
            ("%lanemask_eq", _) => Special::LaneMaskEq,
            ("%lanemask_le", _) => Special::LaneMaskLe,
            ("%lanemask_lt", _) => Special::LaneMaskLt,
            ("%lanemask_ge", _) => Special::LaneMaskGe,
            ("%lanemask_gt", _) => Special::LaneMaskGt,
            ("%dynamic_smem_size", _) => Special::DynamicSharedBytes,
            ("%total_smem_size", _) => Special::TotalSharedBytes,
            ("%cluster_ctarank", _) => Special::ClusterRank,
            ("%cluster_nctarank", _) => Special::ClusterSize,
            ("%is_explicit_cluster", _) => Special::IsCluster,
            (name, _) if name.starts_with("%envreg") => {
                let number = name["%envreg".len()..].parse().ok().filter(|number| *number < 32)?;
                Special::EnvReg(number)
            }
            _ => return None,
        })
    }
}

/// Registers that change while a warp runs.
pub(super) fn is_clock(name: &str) -> bool {
    matches!(
        name,
        "%clock" | "%clock_hi" | "%clock64" | "%globaltimer" | "%globaltimer_lo" | "%globaltimer_hi"
    )
}

/// Registers that PTX has and no program here.
pub(super) fn is_not_simulated(name: &str) -> bool {
    name == "%aggr_smem_size" || name.starts_with("%pm") || name.starts_with("%reserved_smem")
}
