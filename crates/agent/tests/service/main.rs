//! The service as its clients meet it, over real HTTP, and the limits that what they send runs within.

mod confine;
mod http;
mod mcp;

use std::path::PathBuf;

/// The `evosdpa` program of this build.
fn lab() -> String {
    let agent = PathBuf::from(env!("CARGO_BIN_EXE_evosdpa-agent"));
    format!("--lab={}", agent.with_file_name("examples").join("evosdpa").display())
}

const PAGE: &str = include_str!("../../../../docs/agents.md");
const V1: &str = include_str!("../../../kernels/cuda/line/sdpa_v1.cu");

/// The page's blocks of JSON.
fn documents() -> Vec<serde_json::Value> {
    let blocks = PAGE.split("```json\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.map(|text| serde_json::from_str(text).unwrap()).collect()
}

/// `sdpa_v1` reading far past its tensors.
fn out_of_bounds() -> String {
    let row = "threadIdx.x / LANES;\n  if (row >= p.seq_q) return;";
    assert!(V1.contains(row));
    V1.replace(row, "threadIdx.x / LANES + 1000000;")
}
