//! `evosdpa mcp`: the lab as tools of the Model Context Protocol, over standard input and output.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, bail};
use evosdpa_kernels::Registry;
use rmcp::{
    ErrorData, RoleServer, ServerHandler, ServiceExt,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation, JsonObject,
        ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
    },
    service::RequestContext,
};
use serde_json::{Value, json};

use crate::{
    evaluate::{Lab, Order, Place, record},
    serve::Limits,
};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder for what is evaluated
    #[arg(long, default_value = "serves", value_name = "FOLDER")]
    out: PathBuf,
    #[command(flatten)]
    limits: Limits,
}

/// Name, what it does, its parameters (name, type, whether it is needed, what it is).
type Described = (&'static str, &'static str, &'static [(&'static str, &'static str, bool, &'static str)]);

const KERNEL: (&str, &str, bool, &str) = ("kernel", "string", true, "a kernel of list_kernels");
const SOURCE: (&str, &str, bool, &str) = (
    "source",
    "string",
    false,
    "a CUDA source that keeps the kernel's contract; without it the kernel's own",
);
const TUNABLES: (&str, &str, bool, &str) = ("tunables", "object", false, "values of the kernel's tunables");
const PROBLEMS: (&str, &str, bool, &str) =
    ("problems", "array", true, "shapes such as tiny, mission:causal or b2h8s2048d128:causal");
const DTYPE: (&str, &str, bool, &str) = ("dtype", "string", false, "f32, f16, bf16, u8, e4m3 or i8");

const TOOLS: [Described; 6] = [
    ("list_kernels", "The kernels there are, with what each is and what it grew from.", &[]),
    ("explain", "A kernel's contract: manifest, source, headers, tunables.", &[KERNEL]),
    (
        "check_on_simulator",
        "Compiles a CUDA kernel or a new source for it, runs it on a simulator of the GPU, and says whether it is right and what races it \
         has. Needs no GPU.",
        &[KERNEL, SOURCE, TUNABLES, PROBLEMS, DTYPE],
    ),
    (
        "evaluate",
        "Puts a kernel, a variant or a new source through every gate, simulator first, and then measures it beside what the library \
         would run: verdict, reasons, times with intervals.",
        &[KERNEL, SOURCE, TUNABLES, PROBLEMS, DTYPE],
    ),
    (
        "profile",
        "Says what holds a CUDA kernel back, with the numbers that this rests on.",
        &[KERNEL, SOURCE, TUNABLES, PROBLEMS, DTYPE],
    ),
    ("history", "What was evaluated before, the newest first.", &[]),
];

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.out).with_context(|| format!("--out {}", args.out.display()))?;
    let desk = Desk {
        lab: args.limits.lab()?,
        registry: Registry::embedded()?,
        out: args.out.canonicalize()?,
        count: AtomicU64::new(0),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let service = Server { desk: Arc::new(desk) }.serve(rmcp::transport::stdio()).await;
        service.context("no client that speaks the protocol")?.waiting().await?;
        Ok(())
    })
}

struct Server {
    desk: Arc<Desk>,
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("evosdpa", env!("CARGO_PKG_VERSION")))
            .with_instructions(
                "A laboratory for fused attention kernels. A kernel's speed counts only when every gate passes: check on the simulator \
                 first, then evaluate.",
            )
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult { tools: TOOLS.iter().map(tool).collect(), ..ListToolsResult::default() })
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let desk = Arc::clone(&self.desk);
        let stopped = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&stopped);
        let work = tokio::task::spawn_blocking(move || {
            desk.call(&request.name, request.arguments.unwrap_or_default(), &stop)
        });
        let done = tokio::select! {
            done = work => done,
            () = context.ct.cancelled() => {
                stopped.store(true, Ordering::Relaxed);
                return Ok(CallToolResult::error(vec![ContentBlock::text("cancelled")]).into());
            }
        };
        let result = match done {
            Ok(Ok(value)) => CallToolResult::structured(json!({"result": value})),
            Ok(Err(error)) => CallToolResult::error(vec![ContentBlock::text(format!("{error:#}"))]),
            Err(error) => CallToolResult::error(vec![ContentBlock::text(error.to_string())]),
        };
        Ok(result.into())
    }
}

fn tool((name, description, parameters): &Described) -> Tool {
    let mut properties = JsonObject::new();
    for (name, kind, _, description) in *parameters {
        let mut schema = json!({"type": kind, "description": description});
        match *kind {
            "array" => schema["items"] = json!({"type": "string"}),
            "object" => schema["additionalProperties"] = json!({"type": "integer"}),
            _ => {}
        }
        properties.insert((*name).to_owned(), schema);
    }
    let needed: Vec<&str> =
        parameters.iter().filter(|(_, _, needed, _)| *needed).map(|(name, ..)| *name).collect();
    let schema = JsonObject::from_iter([
        ("type".to_owned(), json!("object")),
        ("properties".to_owned(), properties.into()),
        ("required".to_owned(), json!(needed)),
        ("additionalProperties".to_owned(), json!(false)),
    ]);
    Tool::new(*name, *description, schema)
}

/// What tools work with.
struct Desk {
    lab: Lab,
    registry: Registry,
    out: PathBuf,
    count: AtomicU64,
}

impl Desk {
    /// What a tool answers; an error is the caller's to read.
    fn call(&self, name: &str, arguments: JsonObject, stopped: &AtomicBool) -> anyhow::Result<Value> {
        if let Some((_, _, known)) = TOOLS.iter().find(|(tool, ..)| *tool == name) {
            // As the schema says: an argument that had no effect would be misleading.
            let known: Vec<&str> = known.iter().map(|(name, ..)| *name).collect();
            if let Some(unknown) = arguments.keys().find(|given| !known.contains(&given.as_str())) {
                let takes = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                bail!("{name} has no argument `{unknown}`; it takes {takes}");
            }
        }
        match name {
            "list_kernels" => {
                let document = self.lab.document(&["kernels", "--json"], &self.out.join("commands"))?;
                Ok(document["rows"].clone())
            }
            "explain" => {
                let kernel = arguments.get("kernel").and_then(Value::as_str).context("`kernel` is needed")?;
                let kernel = self.registry.kernel(kernel)?;
                let files: JsonObject =
                    kernel.files().into_iter().map(|(name, text)| (name.to_owned(), text.into())).collect();
                Ok(json!({"name": kernel.name(), "summary": kernel.manifest.summary, "files": files}))
            }
            "check_on_simulator" => self.evaluate(arguments, Place::Sim, false, stopped),
            "evaluate" => self.evaluate(arguments, Place::Auto, false, stopped),
            "profile" => self.evaluate(arguments, Place::Sim, true, stopped),
            "history" => self.history(),
            _ => bail!("there is no tool `{name}`; there are {}", TOOLS.map(|(name, ..)| name).join(", ")),
        }
    }

    fn evaluate(
        &self,
        arguments: JsonObject,
        device: Place,
        profile: bool,
        stopped: &AtomicBool,
    ) -> anyhow::Result<Value> {
        let order: Order = serde_json::from_value(arguments.into()).context("the arguments")?;
        let order = Order { device, profile, ..order };
        if let Some(fault) = order.fault(&self.registry) {
            bail!(fault);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        // Names sort by time.
        let id = format!("{:010}-{}-{count:04}", now.as_secs(), std::process::id());
        let folder = self.out.join(&id);
        let name = format!("{}_m{}_{count}", order.kernel, std::process::id());
        let outcome = self.lab.evaluate(&order, &name, &folder, stopped)?;
        record::write(&folder, &record::of(&id, &order, Some(&outcome)))
            .with_context(|| format!("cannot record the evaluation in {}", folder.display()))?;
        Ok(serde_json::to_value(outcome)?)
    }

    /// The evaluations of this folder, without their sources.
    fn history(&self) -> anyhow::Result<Value> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.out)?.flatten() {
            let Some(record) = record::read(&entry.path()) else { continue };
            let order = &record["order"];
            found.push((
                entry.metadata().and_then(|data| data.modified()).unwrap_or(UNIX_EPOCH),
                json!({
                    "task_id": record["task_id"], "kernel": order["kernel"], "tunables": order["tunables"],
                    "problems": order["problems"], "has_source": order["source"].is_string(),
                    "verdict": record["outcome"]["verdict"], "why": record["outcome"]["why"],
                    "performance": record["outcome"]["performance"],
                }),
            ));
        }
        found.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
        Ok(found.into_iter().take(100).map(|(_, record)| record).collect())
    }
}
