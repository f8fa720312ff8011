//! The project's chores: `cargo xtask test` and friends.

fn main() -> anyhow::Result<()> {
    anyhow::bail!("usage: cargo xtask test")
}
