//! A service whose answers are written beforehand.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use serde_json::{Value, json};

/// What the service does with one request.
#[derive(Clone)]
pub(crate) enum Act {
    /// Answers with this status, these headers and this body.
    Respond(u16, Vec<(&'static str, String)>, String),
    /// Takes the request and says nothing.
    Silent,
    /// Begins an answer and adds a byte now and then.
    Drips,
    /// Answers without end.
    Endless,
    /// Closes the connection.
    Closes,
}

/// A chat completion.
pub(crate) fn completion(text: &str) -> Act {
    completion_that_ended(text, "stop")
}

pub(crate) fn completion_that_ended(text: &str, reason: &str) -> Act {
    let body = json!({
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 100},
    });
    Act::Respond(200, vec![], body.to_string())
}

/// A message, as Anthropic's service answers.
pub(crate) fn message(text: &str, reason: &str) -> Act {
    let body = json!({
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": text}],
        "stop_reason": reason,
        "usage": {"input_tokens": 1000, "output_tokens": 100},
    });
    Act::Respond(200, vec![], body.to_string())
}

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: String,
    pub(crate) body: Value,
}

/// The service.
pub(crate) struct Server {
    pub(crate) address: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    /// Acts one after the other; the last one again and again.
    pub(crate) fn start(acts: Vec<Act>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let requests = Arc::clone(&seen);
        thread::spawn(move || {
            let mut acts = acts.into_iter().peekable();
            for stream in listener.incoming().flatten() {
                let Some(request) = read(&stream) else { continue };
                requests.lock().unwrap().push(request);
                let act = acts.next().unwrap();
                if acts.peek().is_none() {
                    acts = vec![act.clone()].into_iter().peekable();
                }
                thread::spawn(move || perform(stream, act));
            }
        });
        Self { address, seen }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

fn read(stream: &TcpStream) -> Option<Seen> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok()?;
    let (mut headers, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            break;
        }
        let line = line.to_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        headers.push_str(&line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let path = first.split(' ').nth(1)?.to_owned();
    Some(Seen { path, headers, body: serde_json::from_slice(&body).unwrap_or(Value::Null) })
}

fn perform(mut stream: TcpStream, act: Act) {
    // A client that has gone is no matter.
    let mut send = |bytes: &[u8]| stream.write_all(bytes).and_then(|()| stream.flush()).is_ok();
    match act {
        Act::Respond(status, headers, body) => {
            let headers: String =
                headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
            let length = body.len();
            send(format!("HTTP/1.1 {status} X\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n{body}").as_bytes());
        }
        Act::Silent => thread::sleep(Duration::from_secs(60)),
        Act::Drips => {
            send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\nconnection: close\r\n\r\n");
            while send(b" ") {
                thread::sleep(Duration::from_millis(50));
            }
        }
        Act::Endless => {
            send(
                b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{\"choices\": [{\"message\": {\"content\": \"",
            );
            while send(&[b'x'; 65536]) {}
        }
        Act::Closes => {}
    }
}
