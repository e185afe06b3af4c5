//! From bytes on a connection to a route's handler.

use std::{
    fs::File,
    io::Read,
    path::Path,
    time::{Duration, Instant},
};

use super::Server;
use crate::{
    api::{ContextInfo, CreateContextRequest, ExecuteRequest, Route, route},
    body::{Body, BodyError},
    conn::Phase,
    context::{Context, Job},
    http::{self, After, Head},
    language::{Language, Start},
};

/// How long the next bytes of a request may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Contexts at once.
const MAX_CONTEXTS: usize = 32;
/// How long a host may take to start before its requester gets no answer.
const START_PATIENCE: Duration = Duration::from_secs(120);
/// Where cells run unless their context says otherwise.
const HOME: &str = "/home/user";

impl Server {
    /// Takes what a client sent.
    pub(super) fn receive(&mut self, serial: u64) {
        let Some(conn) = self.conns.get_mut(&serial) else {
            return;
        };
        if conn.receive(&mut self.scratch).is_err() {
            return self.close(serial);
        }
        self.go_on(serial);
    }

    /// Handles the requests that are whole, one after the other.
    pub(super) fn go_on(&mut self, serial: u64) {
        loop {
            let Some(conn) = self.conns.get_mut(&serial) else {
                return;
            };
            let request = match &mut conn.phase {
                Phase::Head if conn.input.is_empty() => return,
                Phase::Head => match http::parse(&conn.input) {
                    Err(bad) => return conn.refuse(bad.status, bad.message),
                    Ok(None) => {
                        conn.wake.get_or_insert(Instant::now() + PATIENCE);
                        return;
                    }
                    Ok(Some((head, framing, used))) => {
                        conn.input.drain(..used);
                        conn.after = if head.close {
                            After::Close
                        } else {
                            After::KeepAlive
                        };
                        if head.expects_continue && conn.input.is_empty() {
                            conn.out.extend_from_slice(http::CONTINUE);
                        }
                        let body = Body::new(framing);
                        conn.phase = Phase::Body { head, body };
                        continue;
                    }
                },
                Phase::Body { head, body } => match body.take(&mut conn.input) {
                    Ok(None) => {
                        conn.wake = Some(Instant::now() + PATIENCE);
                        return;
                    }
                    Ok(Some(bytes)) => (std::mem::take(head), bytes),
                    Err(error @ BodyError::TooLarge) => {
                        return conn.refuse(413, &error.to_string());
                    }
                    Err(error @ BodyError::Coding(_)) => {
                        return conn.refuse(400, &error.to_string());
                    }
                },
                Phase::Stream | Phase::Await { .. } | Phase::Closing => return,
            };
            conn.wake = None;
            conn.phase = Phase::Head;
            self.begin(serial, &request.0, &request.1);
        }
    }

    fn begin(&mut self, serial: u64, head: &Head, body: &[u8]) {
        match route(&head.method, &head.path) {
            Ok(Route::Health) => self.answer(serial, 200, http::JSON, b"\"OK\""),
            Ok(Route::Ready) => {
                if self.contexts.iter().all(Context::is_ready) {
                    self.answer(serial, 200, http::JSON, b"\"OK\"")
                } else {
                    self.error(serial, 503, "a context is not ready")
                }
            }
            Ok(Route::Execute) => self.execute(serial, body),
            Ok(Route::ListContexts) => {
                let list: Vec<_> = self
                    .contexts
                    .iter()
                    .filter(|c| c.is_listed)
                    .map(info)
                    .collect();
                let list = serde_json::to_vec(&list).unwrap_or_default();
                self.answer(serial, 200, http::JSON, &list);
            }
            Ok(Route::CreateContext) => self.create(serial, body),
            Ok(Route::RestartContext(id)) => self.restart(serial, &id),
            Ok(Route::RemoveContext(id)) => match self.find(&id) {
                Some(context) => {
                    self.remove_context(context);
                    self.answer(serial, 200, http::JSON, b"null");
                }
                None => self.not_found(serial, &id),
            },
            Err((status, message)) => self.error(serial, status, message),
        }
    }

    pub(super) fn answer(&mut self, serial: u64, status: u16, kind: &str, body: &[u8]) {
        if let Some(conn) = self.conns.get_mut(&serial) {
            conn.answer(status, kind, body);
        }
    }

    pub(super) fn error(&mut self, serial: u64, status: u16, message: &str) {
        if let Some(conn) = self.conns.get_mut(&serial) {
            conn.error(status, message);
        }
    }

    fn not_found(&mut self, serial: u64, id: &str) {
        self.error(serial, 404, &format!("Context {id} not found"));
    }

    fn find(&self, id: &str) -> Option<u64> {
        let mut contexts = self.contexts.iter();
        contexts.find(|c| c.id == id).map(|c| c.serial)
    }

    fn execute(&mut self, serial: u64, body: &[u8]) {
        let request: ExecuteRequest = match serde_json::from_slice(body) {
            Ok(request) => request,
            Err(error) => return self.error(serial, 422, &format!("bad request: {error}")),
        };
        let named = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
        let context = match (named(&request.context_id), named(&request.language)) {
            (Some(_), Some(_)) => {
                let text = "Only one of context_id or language can be provided";
                return self.error(serial, 400, text);
            }
            (Some(id), None) => match self.find(&id) {
                Some(context) => context,
                None => return self.not_found(serial, &id),
            },
            (None, language) => match self.language(&language.unwrap_or_default()) {
                Some(language) => self.default_context(language),
                None => return self.unknown_language(serial, request.language.as_deref()),
            },
        };
        let job = Job {
            conn: serial,
            code: request.code,
            env_vars: request.env_vars.unwrap_or_default(),
            store_history: request.store_history.unwrap_or(true),
        };
        let now = Instant::now();
        let Some(found) = self.contexts.iter_mut().find(|c| c.serial == context) else {
            return self.error(serial, 500, "the context is gone");
        };
        if found.push(job).is_err() {
            return self.error(serial, 503, "too many executions wait for this context");
        }
        if let Some(conn) = self.conns.get_mut(&serial) {
            conn.begin_stream(now);
        }
        self.revive(context);
    }

    fn language(&self, name: &str) -> Option<Language> {
        Language::parse(name, &self.config.hosts)
    }

    fn unknown_language(&mut self, serial: u64, language: Option<&str>) {
        let name = language.unwrap_or_default();
        let text = format!("Failed to create context: the language '{name}' is not installed");
        self.error(serial, 500, &text);
    }

    fn create(&mut self, serial: u64, body: &[u8]) {
        let request = match body {
            [] => Ok(CreateContextRequest::default()),
            body => serde_json::from_slice::<CreateContextRequest>(body),
        };
        let request = match request {
            Ok(request) => request,
            Err(error) => return self.error(serial, 422, &format!("bad request: {error}")),
        };
        let named = request.language.clone().unwrap_or_default();
        let Some(language) = self.language(&named) else {
            return self.unknown_language(serial, Some(&named));
        };
        let cwd = request.cwd.filter(|cwd| !cwd.is_empty());
        let cwd = cwd.unwrap_or_else(|| HOME.to_owned());
        if !Path::new(&cwd).is_dir() {
            return self.error(
                serial,
                500,
                &format!("Failed to set working directory {cwd}"),
            );
        }
        if self.contexts.len() >= MAX_CONTEXTS {
            return self.error(serial, 500, "Failed to create context: too many contexts");
        }
        let context = self.add_context(language, cwd, Start::Plain);
        let found = self.contexts.iter().find(|c| c.serial == context);
        let answer = found.map(|c| serde_json::to_vec(&info(c)).unwrap_or_default());
        self.answer_when_ready(serial, context, answer.unwrap_or_default());
    }

    fn restart(&mut self, serial: u64, id: &str) {
        let Some(context) = self.find(id) else {
            return self.not_found(serial, id);
        };
        self.restart_context(context);
        self.answer_when_ready(serial, context, b"null".to_vec());
    }

    fn answer_when_ready(&mut self, serial: u64, context: u64, answer: Vec<u8>) {
        let Some(conn) = self.conns.get_mut(&serial) else {
            return;
        };
        conn.wake = Some(Instant::now() + START_PATIENCE);
        conn.phase = Phase::Await { context, answer };
        self.answer_waiting(context);
    }

    /// The context for cells that name only a language, made on first use.
    pub(super) fn default_context(&mut self, language: Language) -> u64 {
        let found = |c: &Context| c.is_default && c.language == language;
        if let Some(at) = self.contexts.iter().position(found) {
            return self.use_context(at);
        }
        let start = if self.warming {
            Start::Warm
        } else {
            Start::Plain
        };
        let home = if Path::new(HOME).is_dir() { HOME } else { "/" };
        let serial = self.add_context(language, home.to_owned(), start);
        if let Some(context) = self.contexts.iter_mut().find(|c| c.serial == serial) {
            context.is_default = true;
        }
        serial
    }

    /// A context that was made ahead becomes the newest one.
    fn use_context(&mut self, at: usize) -> u64 {
        let mut context = self.contexts.remove(at);
        let serial = context.serial;
        let place = if std::mem::replace(&mut context.is_listed, true) {
            at
        } else {
            self.contexts.len()
        };
        self.contexts.insert(place, context);
        serial
    }

    /// Makes the default context of a language ahead; it is listed once it is used.
    pub(super) fn prepare_context(&mut self, language: Language) {
        let serial = self.default_context(language);
        if let Some(context) = self.contexts.iter_mut().find(|c| c.serial == serial) {
            context.is_listed = false;
        }
    }

    fn add_context(&mut self, language: Language, cwd: String, start: Start) -> u64 {
        let serial = self.serial();
        let id = random_id().unwrap_or_else(|| format!("context-{serial}"));
        self.contexts
            .push(Context::new(serial, id, language, cwd, start));
        self.revive(serial);
        serial
    }
}

fn info(context: &Context) -> ContextInfo<'_> {
    ContextInfo {
        id: &context.id,
        language: context.language.name(),
        cwd: &context.cwd,
    }
}

/// A random UUID (RFC 9562, version 4).
fn random_id() -> Option<String> {
    let mut bytes = [0_u8; 16];
    let mut random = File::open("/dev/urandom").ok()?;
    random.read_exact(&mut bytes).ok()?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [
        hex.get(..8)?,
        hex.get(8..12)?,
        hex.get(12..16)?,
        hex.get(16..20)?,
        hex.get(20..)?,
    ];
    Some(parts.join("-"))
}
