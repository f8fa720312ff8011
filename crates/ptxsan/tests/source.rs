//! The program on CUDA source: compiling, names, variables, several launches, SARIF, JSON. Needs NVRTC, as `cargo xtask setup` installs it.

use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ptxsan"))
}

fn ptxsan(line: &str) -> Output {
    command().args(line.split_whitespace()).output().unwrap()
}

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).display().to_string()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn document(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {} {}", text(&output.stdout), text(&output.stderr));
    })
}

#[test]
fn launches_share_memory_and_variables_have_names() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hidden.npy");
    // `scale<float>` is instantiated because it is named.
    let line = format!(
        "run {} --json -DSCALE_STEP=2 --entry fill --grid 2 --block 32 --args x=fresh:256 i32:64 --then --entry scale<float> \
         --grid 2x1 --block 32,1 --args @x i32:64 --set factor=f32:2.5 --set table=f32:1,2,3,4 --read counter:i32 \
         --read ns::hidden:u32:{} --then --entry say --grid 1 --block 2",
        fixture("tool.cu"),
        file.display()
    );
    let output = ptxsan(&line);
    let said = document(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(said["findings"], json!([]));
    let names: Vec<&str> =
        said["entries"].as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["fill(float*, int)", "void scale<float>(float*, int)", "say()"]);
    let variables = &said["rows"][1]["variables"];
    assert_eq!(variables[0], json!({ "name": "counter", "type": "i32", "values": [128] }));
    assert_eq!(variables[1]["values"], json!([0, 7]));
    assert_eq!(said["rows"][2]["output"], "thread 0\nthread 1\n");
    let written = std::fs::read(file).unwrap();
    assert!(written.ends_with(&[0, 0, 0, 0, 7, 0, 0, 0]), "{written:?}");
}

#[test]
fn names_are_listed_and_chosen_as_people_write_them() {
    let file = fixture("tool.cu");
    let listed = ptxsan(&format!("entries {file}"));
    let said = text(&listed.stdout);
    for line in [
        "fill(float*, int) [_Z4fillPfi]: arguments of 8 bytes, 4 bytes; 0 bytes of shared memory",
        "void scale<double>(double*, int) [_Z5scaleIdEvPT_i]",
        "variable counter: 4 bytes",
        "variable ns::hidden: 8 bytes",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    // The texts of printf are nobody's to set.
    assert!(
        said.contains("variables of CUDA's headers and of the compiler") && !said.contains("variable $"),
        "{said}"
    );
    // The PTX that a compiler made, so that NVRTC need not run for each.
    let module = r".version 8.0
        .target sm_80
        .address_size 64
        .global .align 4 .b8 _ZN1a5countE[4];
        .global .align 4 .b8 _ZN1b5countE[4];
        .visible .entry _Z5scaleIfEvPT_i() { ret; }
        .visible .entry _Z5scaleIdEvPT_i() { ret; }
        .visible .entry _ZN2ns5otherEv() { ret; }";
    let folder = tempfile::tempdir().unwrap();
    let ptx = folder.path().join("names.ptx");
    std::fs::write(&ptx, module).unwrap();
    let run = |more: &[&str]| {
        let line = ["run", ptx.to_str().unwrap(), "--grid", "1", "--block", "1"];
        command().args([&line[..], more].concat()).output().unwrap()
    };
    for name in [
        "other",
        "ns::other",
        "ns::other()",
        "_ZN2ns5otherEv",
        "scale<float>",
        "void scale<double>(double*, int)",
    ] {
        let output = run(&["--entry", name]);
        assert_eq!(output.status.code(), Some(0), "{name}: {}", text(&output.stderr));
    }
    let candidates = "void scale<double>(double*, int), void scale<float>(float*, int)";
    for (more, message) in [
        (&["--entry", "scale"][..], candidates),
        (&["--entry", "scala"][..], "no entry `scala`; the module has: void scale<double>"),
        (&[][..], "none was named (--entry)"),
        (&["--entry", "other", "--read", "count:i32"][..], "a::count, b::count"),
        (&["--entry", "other", "--read", "cunt:i32"][..], "no variable `cunt`; the module has: a::count"),
        (&["--entry", "other", "--set", "a::count=i32:1,2"][..], "has 4 bytes, 8 were given"),
    ] {
        let output = run(more);
        assert_eq!(output.status.code(), Some(2), "{more:?}");
        assert!(text(&output.stderr).contains(message), "{more:?}: {}", text(&output.stderr));
    }
}

#[test]
fn what_does_not_compile_says_why_and_a_missing_compiler_how_to_get_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.cu");
    let run = |source: &str, more: &[&str]| {
        std::fs::write(&file, source).unwrap();
        let line = ["run", file.to_str().unwrap(), "--grid", "1", "--block", "1"];
        let output = command().args([&line[..], more].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{source}");
        text(&output.stderr)
    };
    let said = run("__global__ void k(int* x) { x = y; }", &[]);
    assert!(said.contains("bad.cu(1): error") && said.contains("\"y\" is undefined"), "{said}");
    let said = run("int main() { return 0; }\n__global__ void k() {}", &[]);
    assert!(said.contains("__CUDACC_RTC__") && said.contains("nvcc -ptx"), "{said}");
    let host = "int half(int x) { return x / 2; }\n__global__ void k(int* x) { *x = half(*x); }";
    assert!(run(host, &[]).contains("--nvrtc=-default-device"));
    std::fs::write(&file, host).unwrap();
    let line = ["--nvrtc=-default-device", "--grid", "1", "--block", "1", "--args", "zeros:4"];
    let output = command().arg("run").arg(&file).args(line).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    std::fs::write(&file, "template <class T> __global__ void k(T* x) {}").unwrap();
    let output = command().arg("entries").arg(&file).output().unwrap();
    assert!(text(&output.stdout).contains("a template is compiled when it is named"), "{output:?}");
    let said = run("__device__ int f() { return 1; }", &[]);
    assert!(said.contains("no kernel") && said.contains("scale<float>"), "{said}");
    let said = run("__global__ void k() {}", &["--arch", "sm_1000"]);
    assert!(said.contains("no architecture `sm_1000`; there are sm_75"), "{said}");
    let line = ["run", file.to_str().unwrap(), "--grid", "1", "--block", "1", "--json"];
    let output = command().args(line).env("EVOSDPA_CUDA_HOME", "/nowhere/at/all").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = document(&output);
    assert_eq!(said["error"]["kind"], "compile");
    let message = said["error"]["message"].as_str().unwrap();
    for word in ["/nowhere/at/all", "pip install --target", "cuda-toolkit[", "EVOSDPA_CUDA_HOME"] {
        assert!(message.contains(word), "{word}: {message}");
    }
}

/// What SARIF 2.1.0 requires of a document, and what code hosts read of it.
#[test]
fn what_is_not_simulated_is_refused_with_what_is() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("k.cu");
    for (body, words) in [
        ("int* p = new int; *x = *p; delete p;", "allocate it before the launch"),
        ("tail<<<1, 1>>>(x);", "--then --entry NAME"),
        (
            "int n[8]; for (int i = 0; i < 8; i++) n[i] = x[i]; *x = down(n, *x);",
            "recursion is not simulated; a loop",
        ),
        (r#"asm volatile("{ .reg .b64 t; add.rn.f32x2 t, t, t; }");"#, "packed f32 is Blackwell's"),
        (
            r#"float f[4] = {}; asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4}, {%4,%4}, {%0,%1,%2,%3}, %4, 0;"
               : "+f"(f[0]), "+f"(f[1]), "+f"(f[2]), "+f"(f[3]) : "r"(*x)); *x = f[0];"#,
            "sparse products are not simulated; dense ones are",
        ),
        (
            r#"asm volatile("tensormap.replace.tile.rank.global.b1024.b32 [%0], 1;" :: "l"(x));"#,
            "pass each map as an argument",
        ),
    ] {
        let source = format!(
            "__global__ void tail(int* x) {{ *x = 1; }}\n\
             __device__ __noinline__ int down(int* n, int i) {{ return i < 1 ? n[0] : down(n, i - 1) + n[i & 7] * i; }}\n\
             __global__ void k(int* x) {{ {body} }}\n"
        );
        std::fs::write(&file, source).unwrap();
        let line =
            format!("run {} --arch sm_90a --entry k --grid 1 --block 32 --args zeros:64", file.display());
        let output = ptxsan(&line);
        assert_eq!(output.status.code(), Some(2), "{body}: {}", text(&output.stdout));
        assert!(text(&output.stderr).contains(words), "{body}: {}", text(&output.stderr));
    }
}

#[test]
fn templates_are_named_with_spaces_and_what_nvcc_has_unasked_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("k.cu");
    let source = "template <class T, int N> __global__ void k(T* x) { x[0] = T((unsigned __int128)N * N >> 1) + (T)(x[0] < INFINITY ? M_PI : NAN); }\n";
    std::fs::write(&file, source).unwrap();
    for entry in ["k<double, 10>", "k<double,10>", "k<unsigned char, 4>"] {
        let run = ["--grid", "1", "--block", "1", "--args", "zeros:64"];
        let output = command().arg("run").arg(&file).args(["--entry", entry]).args(run).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{entry}: {}", text(&output.stderr));
    }
}

#[test]
fn findings_are_annotations() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("found.sarif");
    let run = |entry: &str, grid: u32, args: &str| {
        let line = format!(
            "run {} --entry {entry} --grid {grid} --block 64 --sarif {} --args {args}",
            fixture(if grid == 1 { "hazards.ptx" } else { "findings.ptx" }),
            file.display()
        );
        let output = ptxsan(&line);
        assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
        serde_json::from_str::<Value>(&std::fs::read_to_string(&file).unwrap()).unwrap()
    };
    let said = run("missing_barrier", 1, "fresh:256");
    assert_eq!(said["version"], "2.1.0");
    assert!(said["$schema"].as_str().unwrap().ends_with("sarif-schema-2.1.0.json"));
    let driver = &said["runs"][0]["tool"]["driver"];
    assert_eq!(driver["name"], "ptxsan");
    let results = said["runs"][0]["results"].as_array().unwrap();
    assert!(!results.is_empty());
    for result in results {
        let rule = &driver["rules"][result["ruleIndex"].as_u64().unwrap() as usize];
        assert_eq!(rule["id"], result["ruleId"]);
        assert!(!result["message"]["text"].as_str().unwrap().is_empty());
    }
    let race = results.iter().find(|result| result["ruleId"] == "race").unwrap();
    assert_eq!(race["level"], "error");
    let place = |location: &Value| {
        let physical = &location["physicalLocation"];
        let uri = physical["artifactLocation"]["uri"].as_str().unwrap().to_owned();
        (uri.rsplit('/').next().unwrap().to_owned(), physical["region"]["startLine"].as_u64().unwrap())
    };
    assert_eq!(place(&race["locations"][0]), ("hazards.cu".to_owned(), 4));
    assert_eq!(place(&race["relatedLocations"][0]), ("hazards.cu".to_owned(), 5));
    let level = |entry: &str| run(entry, 2, "zeros:4")["runs"][0]["results"][0]["level"].clone();
    assert_eq!((level("lost_update"), level("same_value")), (json!("warning"), json!("note")));
    let clean = run("missing_barrier_ok", 1, "fresh:256");
    assert_eq!(clean["runs"][0]["results"], json!([]));
}

/// Nobody sets the flag: the launch ends after a bounded number of instructions, and says where it was.
#[test]
fn a_spin_is_a_deadlock_that_names_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("spin.ptx");
    let spin = |body: &str| {
        format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry spin(.param .u64 flag)\n{{\n.reg .pred %p<2>;\n\
             .reg .b32 %r<4>;\n.reg .b64 %d<2>;\nld.param.u64 %d1, [flag];\nmov.u32 %r2, 0;\nL:\n{body}\n@%p1 bra L;\nret;\n}}\n"
        )
    };
    let run = |body: &str, more: &str| {
        std::fs::write(&file, spin(body)).unwrap();
        let output = ptxsan(&format!("run {} --grid 1 {more} --json --args zeros:4", file.display()));
        let said = document(&output);
        (
            output.status.code(),
            said["findings"][0].clone(),
            said["rows"][0]["warp_instructions"].as_u64().unwrap(),
        )
    };
    let poll = "ld.volatile.global.u32 %r1, [%d1];\nsetp.eq.u32 %p1, %r1, 0;";
    let counted = "add.u32 %r2, %r2, 1;\nld.volatile.global.u32 %r1, [%d1];\nsetp.eq.u32 %p1, %r1, 0;";
    let lock = "atom.global.cas.b32 %r1, [%d1], 1, 2;\nsetp.ne.u32 %p1, %r1, 1;";
    for body in [poll, counted, lock] {
        for schedule in ["--schedule round-robin", "--schedule random", "--schedule producer-late"] {
            let (code, finding, instructions) = run(body, &format!("--block 32 {schedule}"));
            assert_eq!(code, Some(1), "{body}");
            assert_eq!(finding["kind"], "deadlock", "{finding}");
            let detail = finding["detail"].as_str().unwrap();
            assert!(detail.contains("block 0 warp 0 at PTX line 1"), "{detail}");
            assert!(instructions < 1 << 20, "{body}: {instructions}");
        }
    }
    // Warp 0 ends the loop of the others, and a schedule holds it back for long.
    let helped = "mov.u32 %r1, %tid.x;\nadd.u32 %r2, %r2, 1;\nadd.u32 %r2, %r2, 1;\nsetp.lt.u32 %p1, %r1, 32;\n@%p1 bra S;\n\
                  B:\nld.volatile.global.u32 %r1, [%d1];\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra L;\nret;\n\
                  S:\nst.volatile.global.u32 [%d1], 1;\nbra B;";
    for schedule in ["random", "producer-late"] {
        let (code, finding, instructions) =
            run(helped, &format!("--fail-on error --block 512 --schedule {schedule}"));
        assert_eq!(code, Some(0), "{schedule}: {finding} after {instructions}");
    }
    // A count that ends the loop is no spin, however long nothing else happens.
    let finite = "add.u32 %r2, %r2, 1;\nsetp.lt.u32 %p1, %r2, 40000;";
    let (code, finding, instructions) = run(finite, "--block 32");
    assert_eq!((code, &finding), (Some(0), &Value::Null));
    assert!(instructions > 80_000, "{instructions}");
    // What nobody can prove ends with the budget.
    let endless = "add.u32 %r2, %r2, 1;\nsetp.ne.u32 %p1, %r2, 0;";
    let (code, finding, instructions) = run(endless, "--block 32 --budget 200000");
    assert_eq!((code, &finding["kind"]), (Some(1), &json!("budget")));
    assert!(finding["detail"].as_str().unwrap().contains("PTX line 1"), "{finding} {instructions}");
}
