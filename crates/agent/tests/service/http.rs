//! `evosdpa serve`.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};

use crate::{V1, documents, lab, out_of_bounds};

struct Service {
    child: Child,
    url: String,
    client: ureq::Agent,
    _folder: tempfile::TempDir,
}

impl Service {
    fn start(arguments: &[&str], token: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_evosdpa-agent"));
        command
            .args(["serve", "--listen", "127.0.0.1:0", "--out"])
            .arg(folder.path())
            .arg(lab())
            .args(arguments);
        if let Some(token) = token {
            command.env("EVOSDPA_SERVE_TOKEN", token);
        }
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        let client = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        Self { child, url, client, _folder: folder }
    }

    fn get(&self, path: &str, headers: &[(&str, &str)]) -> (u16, Value) {
        let request = self.client.get(format!("{}{path}", self.url));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let mut response = request.call().unwrap();
        (
            response.status().as_u16(),
            serde_json::from_str(&response.body_mut().read_to_string().unwrap()).unwrap_or_default(),
        )
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let request =
            self.client.post(format!("{}{path}", self.url)).header("content-type", "application/json");
        let mut response = request.send(body.to_string()).unwrap();
        (
            response.status().as_u16(),
            serde_json::from_str(&response.body_mut().read_to_string().unwrap()).unwrap_or_default(),
        )
    }

    fn submit(&self, body: &Value) -> String {
        let (status, answer) = self.post("/evaluate", body);
        assert_eq!(status, 200, "{answer}");
        answer["task_id"].as_str().unwrap().to_owned()
    }

    fn wait(&self, id: &str) -> Value {
        self.get(&format!("/tasks/{id}?timeout=3600"), &[]).1
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn order(source: Option<&str>, device: &str) -> Value {
    json!({"order": {"kernel": "sdpa_v1", "source": source, "problems": ["tiny"], "dtype": "f16", "device": device}})
}

/// Where there is no CUDA compiler nothing of a CUDA kernel can be said.
fn has_compiler() -> bool {
    let output =
        Command::new(lab().trim_start_matches("--lab=")).args(["build", "--kernels", "sdpa_v1"]).output();
    output.unwrap().status.success()
}

#[test]
fn the_page_works_and_verdicts_have_reasons() {
    let service = Service::start(&[], None);
    let documents = documents();
    let variant = service.submit(&documents[0]);
    let mut on_sim = documents[1].clone();
    on_sim["order"]["source"] = V1.into();
    let right = service.submit(&on_sim);
    let past = service.submit(&order(Some(&out_of_bounds()), "auto"));
    let broken = service.submit(&order(Some(&format!("{V1}\nthis is no C++")), "auto"));
    let reads = service.submit(&order(Some("#include \"/etc/passwd\"\n"), "auto"));
    let (_, solution) = service.post(
        "/evaluate",
        &json!({"solution": {"name": "mine", "definition": "sdpa_v1", "spec": {"language": "cuda"},
            "sources": [{"path": "mine.cu", "content": format!("{V1}\n#error no\n")}]}, "workload_uuids": ["tiny"]}),
    );
    let solution = solution["task_id"].as_str().unwrap();

    let done = service.wait(&variant);
    let outcome = &done["outcome"];
    assert_eq!(done["status"], "completed", "{done}");
    // Whether the machine was quiet enough for a verdict is not asked here.
    assert_eq!(
        (&outcome["gates"][0]["stage"], &outcome["gates"][0]["verdict"]),
        (&json!("correctness"), &json!("PASS"))
    );
    let speed = &outcome["performance"][0];
    let [low, high] = [0, 1].map(|side| speed["interval_us"][side].as_f64().unwrap());
    assert!(low <= speed["p50_us"].as_f64().unwrap() && speed["p50_us"].as_f64().unwrap() <= high, "{speed}");
    assert!(speed["speedup"].as_f64().unwrap() > 0.0 && speed["reference"] == "cpu_flash", "{speed}");
    assert_eq!(done["traces"][0]["workload"]["uuid"], "tiny");

    let has_compiler = has_compiler();
    for (id, verdict, stage, words) in [
        (right.as_str(), "PASS", "", ""),
        (past.as_str(), "FAIL", "sim", "out-of-bounds access"),
        (broken.as_str(), "FAIL", "compile", "error"),
        (reads.as_str(), "FAIL", "source", "/etc/passwd"),
        (solution, "FAIL", "compile", "no"),
    ] {
        let done = service.wait(id);
        if !has_compiler && stage != "source" {
            continue;
        }
        let outcome = &done["outcome"];
        assert_eq!(outcome["verdict"], verdict, "{done}");
        let gates = outcome["gates"].as_array().unwrap();
        match gates.iter().find(|gate| gate["verdict"] == "FAIL") {
            Some(failed) => {
                assert_eq!(failed["stage"], stage, "{failed}");
                assert!(failed["detail"].as_str().unwrap().contains(words), "{failed}");
                // What failed before never touches a GPU.
                assert!(gates.iter().all(|gate| gate["stage"] != "correctness"), "{done}");
            }
            None => assert_eq!(verdict, "PASS", "{done}"),
        }
    }
    if has_compiler {
        let trace = &service.wait(solution)["traces"][0];
        assert_eq!(
            (&trace["solution"], &trace["evaluation"]["status"]),
            (&json!("mine"), &json!("COMPILE_ERROR"))
        );
    }
    let (_, all) = service.get("/tasks", &[]);
    assert_eq!(all.as_array().unwrap().len(), 6);
    if has_compiler {
        // Resources and races are those of the variant on the problem: by default it has 64,000 bytes, at 512 keys.
        let variant = json!({"order": {"kernel": "sdpa_v2c", "problems": ["tiny"], "dtype": "f16", "device": "sim",
            "tunables": {"BLOCK_M": 64}}});
        let done = service.wait(&service.submit(&variant));
        let gates = done["outcome"]["gates"].as_array().unwrap();
        let resources = gates.iter().find(|gate| gate["gate"] == "resources").unwrap();
        assert!(resources["detail"].as_str().unwrap().contains("81920 bytes"), "{resources}");
        assert!(gates.iter().any(|gate| gate["stage"] == "races" && gate["verdict"] == "PASS"), "{done}");
    }
    let (_, both) = service.post("/tasks/batch", &json!({"task_ids": [variant, right], "timeout": 1}));
    assert_eq!(both.as_array().unwrap().len(), 2);
}

#[test]
fn what_can_be_known_and_what_is_refused() {
    let service = Service::start(&["--per-client", "2", "--step-timeout", "1"], None);
    let (_, definitions) = service.get("/definitions", &[]);
    assert!(definitions.as_array().unwrap().iter().any(|definition| definition["name"] == "sdpa_v2c"));
    let (_, definition) = service.get("/definitions/sdpa_v1", &[]);
    assert_eq!(definition["files"]["sdpa_v1.cu"], V1);
    let (_, document) = service.get("/openapi.json", &[]);
    let (_, root) = service.get("/", &[]);
    for endpoint in root["endpoints"].as_array().unwrap() {
        let method = endpoint["method"].as_str().unwrap().to_lowercase();
        assert!(document["paths"][endpoint["path"].as_str().unwrap()][&method].is_object(), "{endpoint}");
    }
    let problem = |kernel: &str, problem: &str| json!({"order": {"kernel": kernel, "problems": [problem]}});
    for (body, expected) in [
        (problem("sdpa_v9", "tiny"), "sdpa_v9"),
        (problem("sdpa_v1", "--help"), "--help"),
        (problem("sdpa_v1", "tiny; rm -rf /"), "rm"),
        (json!({"order": {"kernel": "sdpa_v1", "problems": []}}), "0 problems"),
        (
            json!({"order": {"kernel": "sdpa_v1", "problems": ["tiny"], "command": "sh"}}),
            "unknown field `command`",
        ),
        (
            json!({"order": {"kernel": "cpu_flash", "problems": ["tiny"], "source": "x"}}),
            "part of the program",
        ),
        (json!({"order": {"kernel": "sdpa_v1", "problems": ["tiny"], "tunables": {"A": 1}}}), "A"),
        (json!({"order": {"kernel": "sdpa_v1", "problems": ["tiny"], "dtype": "f12"}}), "f12"),
        (
            json!({"solution": {"name": "s", "definition": "sdpa_v1", "spec": {"language": "triton"}}}),
            "triton",
        ),
        (json!({}), "either `solution` or `order`"),
    ] {
        let (status, answer) = service.post("/evaluate", &body);
        assert_eq!(status, 400, "{body}: {answer}");
        assert!(answer["detail"].as_str().unwrap().contains(expected), "{body}: {answer}");
    }
    let long = json!({"order": {"kernel": "sdpa_v1", "source": "x".repeat(3 << 19), "problems": ["tiny"]}});
    assert!(service.post("/evaluate", &long).1["detail"].as_str().unwrap().contains("longer than 1 MiB"));
    assert_eq!(service.get("/tasks/nobody", &[]).0, 404);
    // What the framework refuses is told in the same form.
    for (status, (got, answer)) in [
        (404, service.get("/nowhere", &[])),
        (405, service.get("/evaluate", &[])),
        (400, service.get("/tasks/nobody?timeout=soon", &[])),
        (422, service.post("/tasks/batch", &json!({"task_ids": [1]}))),
    ] {
        assert_eq!(got, status, "{answer}");
        assert!(answer["detail"].as_str().is_some_and(|words| !words.is_empty()), "{status}: {answer}");
    }
    let profile = json!({"order": {"kernel": "cpu_flash", "problems": ["tiny"]}});
    let (status, answer) = service.post("/profile", &profile);
    assert!(status == 400 && answer["detail"].as_str().unwrap().contains("no profile"), "{answer}");
    assert_eq!(service.get("/definitions", &[("origin", "http://evil.example")]).0, 403);
    assert_eq!(service.get("/definitions", &[("host", "evil.example")]).0, 403);

    // One that never ends costs its task alone; meanwhile a client has only so many.
    let hangs =
        V1.replace("const int kv_head", "for (;;) asm volatile(\"\" ::: \"memory\");\n  const int kv_head");
    let first = service.submit(&order(Some(&hangs), "sim"));
    let second = service.submit(&order(Some(&hangs), "sim"));
    let (status, answer) = service.post("/evaluate", &order(None, "sim"));
    assert_eq!(status, 429, "{answer}");
    service.client.delete(format!("{}/tasks/{second}", service.url)).call().unwrap();
    assert_eq!(service.wait(&second)["status"], "cancelled");
    let done = service.wait(&first);
    assert_ne!(done["outcome"]["verdict"], "PASS", "{done}");
    assert_eq!(service.get("/health", &[]).1["queue_size"], 0);
}

#[test]
fn a_token_is_asked_for() {
    let service = Service::start(&[], Some("0123456789abcdef"));
    assert_eq!(service.get("/definitions", &[]).0, 401);
    assert_eq!(service.get("/definitions", &[("authorization", "Bearer 0123456789abcdeX")]).0, 401);
    assert_eq!(service.get("/definitions", &[("authorization", "Bearer 0123456789abcdef")]).0, 200);
    let refused = |token: &str, listen: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evosdpa-agent"));
        let output =
            command.args(["serve", "--listen", listen]).arg(lab()).env("EVOSDPA_SERVE_TOKEN", token).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused("", "0.0.0.0:0").contains("can be reached from other machines"));
    assert!(refused("short", "127.0.0.1:0").contains("shorter than 16"));
}
