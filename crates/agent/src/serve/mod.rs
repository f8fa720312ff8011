//! `evosdpa serve`: the lab as an HTTP service.

mod openapi;
mod routes;
mod solution;
mod tasks;

use std::{
    ffi::OsString,
    io::Write,
    net::{SocketAddr, ToSocketAddrs},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, ensure};
use evosdpa_kernels::Registry;

use self::tasks::Tasks;
use crate::evaluate::{self, Lab};

/// The variable that holds the token.
const TOKEN: &str = "EVOSDPA_SERVE_TOKEN";
/// The shortest token.
const TOKEN_CHARS_MIN: usize = 16;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to listen. Beyond this machine a token is needed, in EVOSDPA_SERVE_TOKEN
    #[arg(long, default_value = "127.0.0.1:8765", value_name = "HOST:PORT")]
    listen: String,
    /// Folder for what is evaluated
    #[arg(long, default_value = "serves", value_name = "FOLDER")]
    out: PathBuf,
    /// Tasks that may wait
    #[arg(long, default_value_t = 64, value_name = "N")]
    queue: usize,
    /// Tasks that one client may have waiting or running
    #[arg(long, default_value_t = 8, value_name = "N")]
    per_client: usize,
    #[command(flatten)]
    limits: Limits,
}

/// What evaluations may use.
#[derive(clap::Args)]
pub(crate) struct Limits {
    /// Seconds that one step of an evaluation may take
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    step_timeout: u64,
    /// GiB of memory that a step on the CPU or the simulator may map
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    memory_gib: u64,
    /// The evosdpa program, a word for each time this is given [default: beside this program, or on PATH]
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    lab: Vec<OsString>,
}

impl Limits {
    /// The lab within them.
    pub(crate) fn lab(&self) -> anyhow::Result<Lab> {
        Ok(Lab {
            agent: std::env::current_exe()?,
            program: evaluate::lab_program(&self.lab)?,
            step_limit: Duration::from_secs(self.step_timeout),
            memory_bytes: self.memory_gib << 30,
        })
    }
}

/// What every request meets.
pub(crate) struct Service {
    tasks: Arc<Tasks>,
    registry: Registry,
    token: Option<String>,
    /// Names under which requests without a token may know this machine.
    is_local: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut addresses = args.listen.to_socket_addrs().with_context(|| format!("--listen {}", args.listen))?;
    let address: SocketAddr = addresses.next().with_context(|| format!("--listen {}", args.listen))?;
    let token = std::env::var(TOKEN).ok().filter(|token| !token.is_empty());
    ensure!(
        token.is_some() || address.ip().is_loopback(),
        "--listen {address} can be reached from other machines: set {TOKEN} to a secret that clients send as `Authorization: Bearer …`"
    );
    ensure!(
        token.as_ref().is_none_or(|token| token.len() >= TOKEN_CHARS_MIN),
        "{TOKEN} is shorter than {TOKEN_CHARS_MIN} characters"
    );
    std::fs::create_dir_all(&args.out).with_context(|| format!("--out {}", args.out.display()))?;
    let out = args.out.canonicalize()?;
    let tasks = Tasks::start(args.limits.lab()?, out, args.queue, args.per_client);
    let is_local = address.ip().is_loopback();
    let service = Arc::new(Service { tasks, registry: Registry::embedded()?, token, is_local });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener =
            tokio::net::TcpListener::bind(address).await.with_context(|| format!("--listen {address}"))?;
        // The first line: what a program that started this one waits for.
        // Who started it may not be reading.
        let _ = writeln!(std::io::stdout(), "listening on http://{}", listener.local_addr()?);
        let app = routes::router(service).into_make_service_with_connect_info::<SocketAddr>();
        axum::serve(listener, app).await.context("the service ended")
    })
}
