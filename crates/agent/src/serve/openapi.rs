//! The service described for programs.

use serde_json::{Map, Value, json};

/// Method, path, what it does, and the schema of its request where it has a body.
type Endpoint = (&'static str, &'static str, &'static str, Option<&'static str>);

const ENDPOINTS: [Endpoint; 12] = [
    ("get", "/", "the service and its endpoints", None),
    ("get", "/health", "whether it works, and how many tasks wait", None),
    ("get", "/openapi.json", "this document", None),
    ("get", "/definitions", "kernels whose contracts can be met", None),
    ("get", "/definitions/{name}", "a kernel: manifest, source, headers, tunables", None),
    ("get", "/definitions/{name}/workloads", "problems to begin with; any other can be spelled", None),
    ("post", "/evaluate", "submit a source or a variant", Some("Evaluate")),
    ("post", "/profile", "the same, with a profile", Some("Evaluate")),
    ("get", "/tasks", "this client's tasks, the newest first", None),
    ("get", "/tasks/{id}", "a task; ?timeout= waits so many seconds for its end", None),
    ("delete", "/tasks/{id}", "cancel a task", None),
    ("post", "/tasks/batch", "several tasks", Some("Batch")),
];

/// The endpoints as a list.
pub(super) fn endpoints() -> Vec<Value> {
    let entry = |(method, path, description, _): &Endpoint| json!({"method": method.to_uppercase(), "path": path, "description": description});
    ENDPOINTS.iter().map(entry).collect()
}

/// The OpenAPI document.
pub(super) fn document() -> Value {
    let mut paths = Map::new();
    for (method, path, description, body) in ENDPOINTS {
        let mut parameters: Vec<Value> = path
            .split(['{', '}'])
            .skip(1)
            .step_by(2)
            .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
            .collect();
        if (method, path) == ("get", "/tasks/{id}") {
            parameters.push(
                json!({"name": "timeout", "in": "query", "schema": {"type": "number", "maximum": 3600}}),
            );
        }
        let mut operation = json!({
            "summary": description,
            "parameters": parameters,
            "responses": {
                "200": {"description": "done"},
                "default": {"description": "refused", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}},
            },
        });
        if let Some(schema) = body {
            let reference = json!({"$ref": format!("#/components/schemas/{schema}")});
            operation["requestBody"] =
                json!({"required": true, "content": {"application/json": {"schema": reference}}});
        }
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[method] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": {"title": "evosdpa", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {"schemas": schemas(), "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    })
}

fn schemas() -> Value {
    let text = json!({"type": "string"});
    let tunables = json!({"type": "object", "additionalProperties": {"type": "integer"}});
    json!({
        "Refusal": {"type": "object", "properties": {"detail": text}},
        "Batch": {
            "type": "object", "required": ["task_ids"],
            "properties": {"task_ids": {"type": "array", "items": text}, "timeout": {"type": "number"}},
        },
        "Evaluate": {
            "type": "object",
            "description": "either `solution`, as FlashInfer-Bench has it, or `order`",
            "properties": {
                "solution": {
                    "type": "object", "required": ["name", "definition"],
                    "properties": {
                        "name": text, "definition": text, "spec": {"type": "object", "properties": {"language": {"const": "cuda"}}},
                        "sources": {"type": "array", "maxItems": 1, "items": {"type": "object", "properties": {"path": text, "content": text}}},
                        "tunables": tunables,
                    },
                },
                "workload_uuids": {"type": "array", "items": text},
                "order": {
                    "type": "object", "required": ["kernel", "problems"],
                    "properties": {
                        "kernel": text, "source": text, "tunables": tunables, "problems": {"type": "array", "items": text},
                        "dtype": text, "device": {"enum": ["auto", "sim"]}, "profile": {"type": "boolean"},
                    },
                },
            },
        },
    })
}
