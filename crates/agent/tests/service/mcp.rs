//! `evosdpa mcp` and a client of the official library.

use std::process::Stdio;

use rmcp::{ServiceExt, model::CallToolRequestParams};
use serde_json::{Value, json};

use crate::{V1, lab};

#[test]
fn a_client_lists_tools_and_calls_them() {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_evosdpa-agent"));
        command.args(["mcp", "--out"]).arg(folder.path()).arg(lab()).kill_on_drop(true);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let streams = (child.stdout.take().unwrap(), child.stdin.take().unwrap());
        let client = ().serve(streams).await.unwrap();

        let tools = client.list_all_tools().await.unwrap();
        let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_ref()).collect();
        assert_eq!(
            names,
            ["list_kernels", "explain", "check_on_simulator", "evaluate", "profile", "history"]
        );
        let call = async |name: &'static str, arguments: Value| -> (bool, Value, String) {
            let arguments = arguments.as_object().unwrap().clone();
            let result =
                client.call_tool(CallToolRequestParams::new(name).with_arguments(arguments)).await.unwrap();
            let text = serde_json::to_string(&result.content).unwrap();
            let value = result.structured_content.unwrap_or_default()["result"].clone();
            (result.is_error == Some(true), value, text)
        };
        let (_, kernels, _) = call("list_kernels", json!({})).await;
        assert!(kernels.as_array().unwrap().iter().any(|kernel| kernel["name"] == "cpu_flash"), "{kernels}");
        let (_, contract, _) = call("explain", json!({"kernel": "sdpa_v1"})).await;
        assert_eq!(contract["files"]["sdpa_v1.cu"], V1);
        let hostile =
            json!({"kernel": "sdpa_v1", "problems": ["tiny"], "source": "#include \"/etc/shadow\"\n"});
        let (is_error, outcome, _) = call("check_on_simulator", hostile).await;
        assert!(!is_error && outcome["verdict"] == "FAIL", "{outcome}");
        assert!(outcome["why"].as_str().unwrap().contains("/etc/shadow"), "{outcome}");
        let (is_error, _, text) = call("evaluate", json!({"kernel": "sdpa_v1", "problems": ["tinny"]})).await;
        assert!(is_error && text.contains("tinny"), "{text}");
        let (is_error, _, text) = call("history", json!({"kernel": "sdpa_v1"})).await;
        assert!(is_error && text.contains("has no argument `kernel`; it takes none"), "{text}");
        let (_, history, _) = call("history", json!({})).await;
        assert_eq!((&history[0]["verdict"], &history[0]["has_source"]), (&json!("FAIL"), &json!(true)));
        assert_eq!(history.as_array().unwrap().len(), 1);
        client.cancel().await.unwrap();
    });
}
