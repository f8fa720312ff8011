//! The service's addresses.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{ConnectInfo, DefaultBodyLimit, Path, Query, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use evosdpa_kernels::Layer;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Service, openapi,
    solution::{self, Evaluate},
};
use crate::evaluate::CPU_KERNELS;

/// The longest request.
const BODY_BYTES_MAX: usize = 2 << 20;
/// The longest wait of one request.
const WAIT_MAX_S: f64 = 3600.0;

type Shared = State<Arc<Service>>;
type Answer = Result<Json<Value>, Refusal>;

/// A refusal: status and words.
struct Refusal(StatusCode, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, detail) = self;
        let mut response = (status, Json(json!({"detail": detail}))).into_response();
        if status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("5"));
        }
        response
    }
}

/// Bytes of a refusal's words that are read.
const WORDS_BYTES_MAX: usize = 64 << 10;
/// Characters of them that are told: a parser may repeat what it was given.
const WORDS_CHARS_MAX: usize = 500;

/// What the framework refuses (a body that is no JSON, one that is too long, an address or a method that is not there) says so in
/// the form of every other refusal.
async fn described(response: Response) -> Response {
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE).map(header::HeaderValue::as_bytes);
    let is_told = kind.is_some_and(|kind| kind.starts_with(b"application/json"));
    if is_told || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let words = axum::body::to_bytes(body, WORDS_BYTES_MAX).await.unwrap_or_default();
    let words: String = String::from_utf8_lossy(&words).chars().take(WORDS_CHARS_MAX).collect();
    let words = match status {
        _ if !words.is_empty() => words,
        StatusCode::NOT_FOUND => "there is no such address; GET / lists them".to_owned(),
        other => other.canonical_reason().unwrap_or("refused").to_owned(),
    };
    let mut told = Refusal(status, words).into_response();
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.remove(header::CONTENT_TYPE);
    told.headers_mut().extend(parts.headers);
    told
}

fn not_found(what: &str, name: &str) -> Refusal {
    Refusal(StatusCode::NOT_FOUND, format!("{what} not found: {name}"))
}

pub(super) fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/", get(root))
        .route("/health", get(health))
        .route("/openapi.json", get(|| async { Json(openapi::document()) }))
        .route("/definitions", get(definitions))
        .route("/definitions/{name}", get(definition))
        .route("/definitions/{name}/workloads", get(workloads))
        .route("/evaluate", post(evaluate))
        .route("/profile", post(profile))
        .route("/tasks", get(tasks))
        .route("/tasks/batch", post(batch))
        .route("/tasks/{id}", get(task).delete(cancel))
        .layer(middleware::from_fn_with_state(Arc::clone(&service), admit))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::map_response(described))
        .with_state(service)
}

/// Who may ask: who has the token; without one, who is on this machine and no page of a browser.
async fn admit(State(service): Shared, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let refused = match &service.token {
        Some(token) => {
            let given = text(headers, header::AUTHORIZATION.as_str());
            (!is_same(given.strip_prefix("Bearer ").unwrap_or_default(), token)).then(|| {
                Refusal(
                    StatusCode::UNAUTHORIZED,
                    "`Authorization: Bearer …` with the service's token is needed".to_owned(),
                )
            })
        }
        None => {
            let host = text(headers, header::HOST.as_str());
            let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
            let is_here = !service.is_local || ["localhost", "127.0.0.1", "[::1]"].contains(&name);
            (!is_here || headers.contains_key(header::ORIGIN)).then(|| {
                Refusal(
                    StatusCode::FORBIDDEN,
                    "pages of a browser may not ask; set EVOSDPA_SERVE_TOKEN for others".to_owned(),
                )
            })
        }
    };
    match refused {
        Some(refusal) => refusal.into_response(),
        None => next.run(request).await,
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Equality whose time says nothing about where texts differ.
fn is_same(given: &str, token: &str) -> bool {
    let differences = given.bytes().zip(token.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    given.len() == token.len() && differences == 0
}

async fn root() -> Json<Value> {
    Json(json!({
        "name": "evosdpa", "version": env!("CARGO_PKG_VERSION"), "docs": "/openapi.json",
        "endpoints": openapi::endpoints(),
    }))
}

async fn health(State(service): Shared) -> Json<Value> {
    let queue_size = service.tasks.waiting();
    Json(json!({"status": "ok", "workers": [{"device": "auto", "healthy": true}], "queue_size": queue_size}))
}

async fn definitions(State(service): Shared) -> Json<Value> {
    let of_gpu = service
        .registry
        .kernels()
        .map(|kernel| json!({"name": kernel.name(), "description": kernel.manifest.summary}));
    let of_cpu =
        CPU_KERNELS.map(|name| json!({"name": name, "description": "part of the program: tunables only"}));
    Json(of_gpu.chain(of_cpu).collect())
}

async fn definition(State(service): Shared, Path(name): Path<String>) -> Answer {
    let kernel = service.registry.kernel(&name).map_err(|_| not_found("Definition", &name))?;
    let tunables: Vec<Value> = [Layer::Macro, Layer::Micro]
        .into_iter()
        .flat_map(|layer| kernel.space().layer(layer))
        .map(|tunable| json!({"name": tunable.name, "values": tunable.values, "why": tunable.why}))
        .collect();
    let files: serde_json::Map<String, Value> =
        kernel.files().into_iter().map(|(name, text)| (name.to_owned(), text.into())).collect();
    Ok(Json(json!({
        "name": name, "op_type": "sdpa", "description": kernel.manifest.summary,
        "manifest": kernel.manifest_text, "tunables": tunables, "files": files,
        "reference": "O = softmax(Q·Kᵀ·scale + mask)·V, in double precision",
    })))
}

async fn workloads(State(service): Shared, Path(name): Path<String>) -> Answer {
    let is_known = service.registry.kernel(&name).is_ok() || CPU_KERNELS.contains(&name.as_str());
    let all = solution::WORKLOADS.map(|uuid| json!({"uuid": uuid, "axes": {}, "inputs": {}}));
    if is_known { Ok(Json(all.to_vec().into())) } else { Err(not_found("Definition", &name)) }
}

async fn evaluate(service: Shared, from: ConnectInfo<SocketAddr>, body: Json<Value>) -> Answer {
    submit(&service, from, body, false)
}

async fn profile(service: Shared, from: ConnectInfo<SocketAddr>, body: Json<Value>) -> Answer {
    submit(&service, from, body, true)
}

fn submit(
    service: &Service,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    Json(body): Json<Value>,
    profile: bool,
) -> Answer {
    let bad = |why: String| Refusal(StatusCode::BAD_REQUEST, why);
    let request: Evaluate = serde_json::from_value(body).map_err(|error| bad(error.to_string()))?;
    let (order, name) = request.order(profile).map_err(bad)?;
    if let Some(fault) = order.fault(&service.registry) {
        return Err(bad(fault));
    }
    let task = service.tasks.submit(order, name, &from.ip().to_string());
    let task = task.map_err(|full| Refusal(StatusCode::TOO_MANY_REQUESTS, full.0))?;
    Ok(Json(json!({"task_id": task.id, "normalized_solution_name": task.name})))
}

#[derive(Deserialize)]
struct Wait {
    #[serde(default)]
    timeout: f64,
}

#[derive(Deserialize)]
struct Batch {
    task_ids: Vec<String>,
    #[serde(default)]
    timeout: f64,
}

async fn task(State(service): Shared, Path(id): Path<String>, Query(wait): Query<Wait>) -> Answer {
    let all = found(&service, &[id], wait.timeout).await?;
    Ok(Json(all.into_iter().next().unwrap_or_default()))
}

async fn batch(State(service): Shared, Json(batch): Json<Batch>) -> Answer {
    Ok(Json(found(&service, &batch.task_ids, batch.timeout).await?.into()))
}

/// Tasks, waited for.
async fn found(service: &Service, ids: &[String], timeout_s: f64) -> Result<Vec<Value>, Refusal> {
    let missing = |id: &&String| service.tasks.find(id).is_none();
    if let Some(missing) = ids.iter().find(missing) {
        return Err(not_found("Task", missing));
    }
    if !(0.0..=WAIT_MAX_S).contains(&timeout_s) {
        let why = format!("timeout: {timeout_s} is not between 0 and {WAIT_MAX_S} seconds");
        return Err(Refusal(StatusCode::UNPROCESSABLE_ENTITY, why));
    }
    service.tasks.wait(ids, Duration::from_secs_f64(timeout_s)).await;
    Ok(ids.iter().filter_map(|id| service.tasks.find(id)).map(|task| solution::view(&task)).collect())
}

async fn cancel(State(service): Shared, Path(id): Path<String>) -> Answer {
    service.tasks.find(&id).ok_or_else(|| not_found("Task", &id))?;
    service.tasks.cancel(&id);
    Ok(Json(service.tasks.find(&id).map(|task| solution::view(&task)).unwrap_or_default()))
}

async fn tasks(State(service): Shared, ConnectInfo(from): ConnectInfo<SocketAddr>) -> Json<Value> {
    Json(service.tasks.of(&from.ip().to_string()).iter().map(solution::view).collect())
}
