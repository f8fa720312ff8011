//! A model at an address.
//!
//! One address and no other: redirections are not followed. A key comes from the environment, goes into one header, and is
//! taken out of whatever the service says before that is kept or shown.

use std::{
    io::Write,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use ureq::http::{Response, Uri};

use super::{Api, Failure, Model, Reply, Turn, anthropic, openai};

/// The longest response that is read.
const RESPONSE_BYTES_MAX: u64 = 4 << 20;
/// Time to reach the service.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// Tries of one question.
const TRIES_MAX: u32 = 7;
/// The first pause between tries; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// A model that is asked over HTTP.
pub(crate) struct Http {
    agent: ureq::Agent,
    api: Api,
    url: Uri,
    model: String,
    key: Option<String>,
}

impl Http {
    /// The model at an address. Without `api` the address says how it is spoken to.
    pub(crate) fn new(url: &str, model: &str, api: Option<Api>) -> anyhow::Result<Self> {
        let base: Uri = url.parse().with_context(|| format!("--llm {url}: this is no URL"))?;
        let (Some(scheme), Some(host)) = (base.scheme_str(), base.host()) else {
            bail!(
                "--llm {url}: a URL such as http://localhost:8000/v1 or https://api.openai.com/v1 is needed"
            );
        };
        ensure!(matches!(scheme, "http" | "https"), "--llm {url}: only http and https are spoken");
        let authority = base.authority().map_or("", |authority| authority.as_str());
        // Not repeated: it may hold a password.
        ensure!(!authority.contains('@'), "--llm: a key belongs into EVOSDPA_LLM_API_KEY, not into the URL");
        ensure!(base.query().is_none(), "--llm: the URL may have no `?`");
        let is_at = |domain: &str| host == domain || host.ends_with(&format!(".{domain}"));
        let path = base.path().trim_end_matches('/');
        let api = api.unwrap_or(match () {
            () if is_at("anthropic.com") || path.ends_with("/messages") => Api::Anthropic,
            () => Api::Openai,
        });
        let url = format!("{scheme}://{authority}{}", full_path(api, path)).parse()?;
        let set = |name: &str| std::env::var(name).ok().filter(|key| !key.trim().is_empty());
        // The keys of others go to those they belong to and to nobody else.
        let key = set("EVOSDPA_LLM_API_KEY").or_else(|| match () {
            () if is_at("api.openai.com") => set("OPENAI_API_KEY"),
            () if is_at("api.anthropic.com") => set("ANTHROPIC_API_KEY"),
            () => None,
        });
        let is_near = host == "localhost" || host.starts_with("127.") || host == "[::1]";
        ensure!(
            key.is_none() || scheme == "https" || is_near,
            "--llm: a key is not sent in the clear to {host}: use https, or unset EVOSDPA_LLM_API_KEY"
        );
        let key = key.map(|key| key.trim().to_owned());
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_LIMIT))
            .user_agent(concat!("evosdpa/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        Ok(Self { agent, api, url, model: model.to_owned(), key })
    }

    fn body(&self, turns: &[Turn], tokens_max: u64) -> String {
        let is_openai = self.url.host() == Some("api.openai.com");
        let body = match self.api {
            Api::Openai => openai::body(&self.model, turns, tokens_max, is_openai),
            Api::Anthropic => anthropic::body(&self.model, turns, tokens_max),
        };
        body.to_string()
    }

    /// One try.
    fn once(&self, body: &str, left: Duration) -> Result<Reply, Trouble> {
        let mut request = self.agent.post(&self.url).header("content-type", "application/json");
        request = match (self.api, &self.key) {
            (Api::Openai, Some(key)) => request.header("authorization", format!("Bearer {key}")),
            (Api::Anthropic, Some(key)) => request.header("x-api-key", key),
            (_, None) => request,
        };
        if self.api == Api::Anthropic {
            request = request.header("anthropic-version", anthropic::VERSION);
        }
        let mut response =
            request.config().timeout_global(Some(left)).build().send(body).map_err(Trouble::of)?;
        let status = response.status().as_u16();
        let pause = retry_after(&response);
        let body = response.body_mut().with_config().limit(RESPONSE_BYTES_MAX).read_to_vec();
        if status == 200 {
            let body = body.map_err(Trouble::of)?;
            let reply = match self.api {
                Api::Openai => openai::reply(&body),
                Api::Anthropic => anthropic::reply(&body),
            };
            return reply.map_err(|why| {
                Trouble::Final(Failure::Unanswered(format!(
                    "the service's response is not understood: {why}"
                )))
            });
        }
        let said = body.map(|body| said(&body)).unwrap_or_default();
        let why = format!("{} answered with status {status}{said}", self.url);
        Err(match status {
            408 | 429 | 500 | 502 | 503 | 504 | 529 => Trouble::Passing { why, pause },
            _ => Trouble::Final(Failure::Fatal(why)),
        })
    }

    fn without_key(&self, text: String) -> String {
        match &self.key {
            Some(key) => text.replace(key.as_str(), "[key]"),
            None => text,
        }
    }
}

impl Model for Http {
    fn ask(&mut self, _: u64, turns: &[Turn], tokens_max: u64, deadline: Instant) -> Result<Reply, Failure> {
        let body = self.body(turns, tokens_max);
        let mut pause = FIRST_PAUSE;
        for tries in 1.. {
            let left = deadline.saturating_duration_since(Instant::now());
            let (why, asked_pause) = match self.once(&body, left) {
                Ok(reply) => return Ok(Reply { text: self.without_key(reply.text), ..reply }),
                Err(Trouble::Final(Failure::Fatal(why))) => {
                    return Err(Failure::Fatal(self.without_key(why)));
                }
                Err(Trouble::Final(Failure::Unanswered(why))) => {
                    return Err(Failure::Unanswered(self.without_key(why)));
                }
                Err(Trouble::Final(Failure::UsedUp)) => return Err(Failure::UsedUp),
                Err(Trouble::Passing { why, pause }) => (self.without_key(why), pause),
            };
            let wait = asked_pause.unwrap_or(pause).max(Duration::from_millis(50));
            pause = (2 * pause).min(Duration::from_secs(30));
            if tries >= TRIES_MAX {
                return Err(Failure::Fatal(format!("{why}, {tries} times")));
            }
            if Instant::now() + wait >= deadline {
                return Err(Failure::Fatal(format!(
                    "{why}; to try again after {:.0} s would take longer than --proposer-timeout",
                    wait.as_secs_f64()
                )));
            }
            // Who reads it may be gone.
            let _ = writeln!(std::io::stderr(), "llm: {why}; trying again after {:.1} s", wait.as_secs_f64());
            thread::sleep(wait);
        }
        unreachable!("the loop ends by returning")
    }
}

/// What went wrong with one try.
enum Trouble {
    /// It may be over in a moment, or after as long as the service says.
    Passing {
        why: String,
        pause: Option<Duration>,
    },
    Final(Failure),
}

impl Trouble {
    fn of(error: ureq::Error) -> Self {
        match error {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                Self::Passing { why: format!("the service cannot be reached: {error}"), pause: None }
            }
            ureq::Error::Timeout(_) => {
                Self::Final(Failure::Unanswered("the model did not answer in time".to_owned()))
            }
            ureq::Error::BodyExceedsLimit(_) => Self::Final(Failure::Unanswered(format!(
                "the service's response is longer than {} MiB",
                RESPONSE_BYTES_MAX >> 20
            ))),
            // A body that ends in the middle comes as one of these, with its reason inside.
            ureq::Error::Io(error) if error.to_string().contains("timeout") => {
                Self::Final(Failure::Unanswered("the model did not answer in time".to_owned()))
            }
            error @ (ureq::Error::Io(_)
            | ureq::Error::ConnectionFailed
            | ureq::Error::HostNotFound
            | ureq::Error::Protocol(_)) => {
                Self::Passing { why: format!("the service cannot be asked: {error}"), pause: None }
            }
            error => Self::Final(Failure::Fatal(format!("the service cannot be asked: {error}"))),
        }
    }
}

fn full_path(api: Api, path: &str) -> String {
    let (ending, versioned) = match api {
        Api::Openai => ("/chat/completions", "/chat/completions"),
        Api::Anthropic => ("/messages", "/v1/messages"),
    };
    match () {
        () if path.ends_with(ending) => path.to_owned(),
        () if path.is_empty() => versioned.to_owned(),
        () => format!("{path}{ending}"),
    }
}

fn retry_after<T>(response: &Response<T>) -> Option<Duration> {
    let seconds: f64 = response.headers().get("retry-after")?.to_str().ok()?.trim().parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// What the service says about an error, in short.
fn said(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let message = serde_json::from_str::<serde_json::Value>(&text).ok().and_then(|value| {
        let error = value.get("error")?;
        error.get("message").or(Some(error))?.as_str().map(str::to_owned)
    });
    let text = message.unwrap_or_else(|| text.into_owned());
    let shown: String = text.trim().chars().filter(|c| !c.is_control()).take(300).collect();
    if shown.is_empty() { shown } else { format!(": {shown}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_says_how_it_is_spoken_to() {
        for (url, api, expected) in [
            ("http://localhost:8000/v1", None, "http://localhost:8000/v1/chat/completions"),
            ("http://localhost:8000/v1/", None, "http://localhost:8000/v1/chat/completions"),
            ("http://localhost:8000", None, "http://localhost:8000/chat/completions"),
            ("https://host/a/chat/completions", None, "https://host/a/chat/completions"),
            ("https://api.anthropic.com", None, "https://api.anthropic.com/v1/messages"),
            ("https://api.anthropic.com/v1", None, "https://api.anthropic.com/v1/messages"),
            ("http://[::1]:1/v1/messages", None, "http://[::1]:1/v1/messages"),
            ("http://localhost:1/v1", Some(Api::Anthropic), "http://localhost:1/v1/messages"),
        ] {
            assert_eq!(Http::new(url, "m", api).unwrap().url.to_string(), expected);
        }
        for (url, expected) in [
            ("localhost:8000", "a URL such as"),
            ("ftp://host/v1", "only http and https"),
            ("http://user:secret@host/v1", "EVOSDPA_LLM_API_KEY"),
            ("http://host/v1?key=secret", "no `?`"),
            ("http://ho st/", "no URL"),
        ] {
            let error = format!("{:#}", Http::new(url, "m", None).err().unwrap());
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!expected.contains("KEY") || !error.contains("secret"), "{error}");
        }
    }
}
