//! Handlers of the routes.

use std::path::Path;

use transport::{Head, Key, http};

use super::{
    contexts::HOME,
    state::{Conn, Interpreter, Job},
    stream,
};
use crate::{
    api::{ContextInfo, CreateContextRequest, ExecuteRequest, Route, route},
    context::{self, Context},
    event::Event,
    language::{Language, Start},
};

/// Number of contexts beyond which `POST /contexts` is rejected. Default contexts are created regardless of it.
const MAX_CONTEXTS: usize = 32;

impl Interpreter {
    /// Calls the handler of a request.
    pub(super) fn route(&mut self, key: Key, conn: &mut Conn, head: &Head<()>, body: &[u8]) {
        match route(&head.method, &head.path) {
            Ok(Route::Execute) => self.execute(key, conn, body),
            Ok(Route::Health) => conn.answer(200, http::JSON, b"\"OK\""),
            Ok(Route::Ready) => {
                if self.contexts.iter().all(|(_, context)| context.is_ready()) {
                    conn.answer(200, http::JSON, b"\"OK\"");
                } else {
                    conn.error(503, "a context is not ready");
                }
            }
            Ok(Route::ListContexts) => self.list(conn),
            Ok(Route::CreateContext) => self.create(key, conn, body),
            Ok(Route::RestartContext(id)) => match self.find(&id) {
                Some(context) => {
                    self.restart_context(context);
                    self.answer_when_ready(key, conn, context, b"null".to_vec());
                }
                None => not_found(conn, &id),
            },
            Ok(Route::RemoveContext(id)) => match self.find(&id) {
                Some(context) => {
                    self.remove_context(context);
                    conn.answer(200, http::JSON, b"null");
                }
                None => not_found(conn, &id),
            },
            Err((status, message)) => conn.error(status, message),
        }
    }

    fn find(&self, id: &str) -> Option<Key> {
        let mut contexts = self.contexts.iter();
        contexts.find(|(_, c)| c.id == id).map(|(key, _)| key)
    }

    fn list(&self, conn: &mut Conn) {
        let mut listed: Vec<&Context> = self
            .contexts
            .iter()
            .map(|(_, context)| context)
            .filter(|context| context.is_listed)
            .collect();
        listed.sort_unstable_by_key(|context| context.order);
        let listed: Vec<_> = listed.into_iter().map(info).collect();
        let listed = serde_json::to_vec(&listed).unwrap_or_default();
        conn.answer(200, http::JSON, &listed);
    }

    fn execute(&mut self, key: Key, conn: &mut Conn, body: &[u8]) {
        let request: ExecuteRequest = match serde_json::from_slice(body) {
            Ok(request) => request,
            Err(error) => return conn.error(422, &format!("bad request: {error}")),
        };
        let named = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
        let context = match (named(&request.context_id), named(&request.language)) {
            (Some(_), Some(_)) => {
                let text = "Only one of context_id or language can be provided";
                return conn.error(400, text);
            }
            (Some(id), None) => match self.find(&id) {
                Some(context) => context,
                None => return not_found(conn, &id),
            },
            (None, language) => match self.language(&language.unwrap_or_default()) {
                Some(language) => self.default_context(language),
                None => return self.refuse_language(conn, request.language.as_deref()),
            },
        };
        let job = context::Job {
            conn: key,
            code: request.code,
            env_vars: request.env_vars.unwrap_or_default(),
            store_history: request.store_history.unwrap_or(true),
        };
        let Some(found) = self.contexts.get_mut(context) else {
            return conn.error(500, "the context is gone");
        };
        if found.push(job).is_err() {
            return conn.error(503, "too many executions wait for this context");
        }
        stream::begin(conn, context);
        self.begin_own(conn, context);
    }

    /// Begins the cell of this connection at once if the context is idle; otherwise the cell waits for the host.
    fn begin_own(&mut self, conn: &mut Conn, key: Key) {
        self.start_host(key);
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        match context.dispatch(&mut self.clone) {
            // An idle context has an empty queue, so the cell that begins is this connection's.
            Ok(Some((_, execution_count))) => {
                stream::push_first(conn, &Event::NumberOfExecutions { execution_count });
            }
            Ok(None) => return,
            Err(_) => {}
        }
        if context.has_pending_request() {
            // The socket is full or broken: the pump waits for room, or replaces the host.
            self.enqueue(Job::Context, key);
        }
    }

    fn language(&self, name: &str) -> Option<Language> {
        Language::parse(name, &self.config.hosts)
    }

    fn refuse_language(&self, conn: &mut Conn, language: Option<&str>) {
        let name = language.unwrap_or_default();
        let cure = Language::cure(name, &self.config.hosts);
        let text = format!(
            "Failed to create context: the language '{name}' is not installed in this sandbox: {cure}"
        );
        conn.error(500, &text);
    }

    fn create(&mut self, key: Key, conn: &mut Conn, body: &[u8]) {
        let request = match body {
            [] => Ok(CreateContextRequest::default()),
            body => serde_json::from_slice::<CreateContextRequest>(body),
        };
        let request = match request {
            Ok(request) => request,
            Err(error) => return conn.error(422, &format!("bad request: {error}")),
        };
        let named = request.language.clone().unwrap_or_default();
        let Some(language) = self.language(&named) else {
            return self.refuse_language(conn, Some(&named));
        };
        let cwd = request.cwd.filter(|cwd| !cwd.is_empty());
        let cwd = cwd.unwrap_or_else(|| HOME.to_owned());
        if !Path::new(&cwd).is_dir() {
            return conn.error(500, &format!("Failed to set working directory {cwd}"));
        }
        if self.contexts.len() >= MAX_CONTEXTS {
            return conn.error(500, "Failed to create context: too many contexts");
        }
        let context = self.add_context(language, cwd, Start::Plain);
        let found = self.contexts.get(context);
        let answer = found.map(|c| serde_json::to_vec(&info(c)).unwrap_or_default());
        self.answer_when_ready(key, conn, context, answer.unwrap_or_default());
    }

    fn answer_when_ready(&mut self, key: Key, conn: &mut Conn, context: Key, answer: Vec<u8>) {
        stream::wait(conn, context);
        let Some(found) = self.contexts.get_mut(context) else {
            return;
        };
        found.waiting.push((key, answer));
        if found.host.is_none() {
            self.fail_waiting(context);
        }
        self.answer_waiting(context);
    }
}

fn not_found(conn: &mut Conn, id: &str) {
    conn.error(404, &format!("Context {id} not found"));
}

fn info(context: &Context) -> ContextInfo<'_> {
    ContextInfo {
        id: &context.id,
        language: context.language.name(),
        cwd: &context.cwd,
    }
}
