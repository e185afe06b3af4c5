//! Creating, restarting and removing contexts.

use std::{fs::File, io::Read, path::Path, time::Instant};

use transport::Key;

use super::{
    notice::Notice,
    state::{Interpreter, REAP},
};
use crate::{
    context::{Context, State},
    language::{Language, Start},
};

/// Working directory of cells unless their context has another.
pub(super) const HOME: &str = "/home/user";

impl Interpreter {
    /// The context of cells that name only a language, created on first use.
    pub(super) fn default_context(&mut self, language: Language) -> Key {
        let mut contexts = self.contexts.iter();
        let found = contexts.find(|(_, c)| c.is_default && c.language == language);
        let found = found.map(|(key, _)| key);
        drop(contexts);
        if let Some(key) = found {
            self.list_context(key);
            return key;
        }
        let start = if self.warming {
            Start::Warm
        } else {
            Start::Plain
        };
        let home = if Path::new(HOME).is_dir() { HOME } else { "/" };
        let key = self.add_context(language, home.to_owned(), start);
        if let Some(context) = self.contexts.get_mut(key) {
            context.is_default = true;
        }
        key
    }

    /// Adds a context that was created ahead to the listing, as the newest one.
    fn list_context(&mut self, key: Key) {
        if let Some(context) = self.contexts.get_mut(key).filter(|c| !c.is_listed) {
            self.created += 1;
            context.order = self.created;
            context.is_listed = true;
        }
    }

    /// Creates the default context of a language ahead; it is listed once it is used.
    pub(super) fn prepare_context(&mut self, language: Language) {
        let key = self.default_context(language);
        if let Some(context) = self.contexts.get_mut(key) {
            context.is_listed = false;
        }
    }

    pub(super) fn add_context(&mut self, language: Language, cwd: String, start: Start) -> Key {
        self.created += 1;
        let order = self.created;
        let id = random_id().unwrap_or_else(|| format!("context-{order}"));
        let context = Context::new(order, id, language, cwd, start);
        let key = self.contexts.insert(context);
        self.start_host(key);
        key
    }

    /// Starts a host if the context has none. If that fails, so does everything that waits for the host.
    pub(super) fn start_host(&mut self, key: Key) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        if !matches!(context.state, State::Failed) {
            return;
        }
        let (hosts, clone, zygote) = (&self.config.hosts, &mut self.clone, &mut self.zygote);
        let started = context.start(hosts, clone, zygote);
        if started.is_err() || context.watch(&self.io, key).is_err() {
            self.end_host(key);
            self.fail_waiting(key);
        }
    }

    /// Kills the host, however busy it is. The context counts as failed until another host is started.
    pub(super) fn end_host(&mut self, key: Key) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        context.state = State::Failed;
        if let Some(child) = context.host.take().and_then(|host| host.kill()) {
            self.dying.push(child);
            self.reap_at.get_or_insert_with(|| Instant::now() + REAP);
        }
    }

    /// Called when no host can be started: fails the cells and requests that wait for one.
    pub(super) fn fail_waiting(&mut self, key: Key) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let language = context.language.name();
        let mut text = format!("Failed to create context: the host of {language} does not start");
        // The packages of the other languages are part of every template with this server.
        if matches!(context.language, Language::Java | Language::Kernel(_)) {
            let cure = Language::cure(language, &self.config.hosts);
            text.push_str(&format!(", some of its programs may be missing: {cure}"));
        }
        let jobs = std::mem::take(&mut context.queue);
        let waiting = std::mem::take(&mut context.waiting);
        for job in jobs {
            self.notify(Some(job.conn), Notice::NoHost(text.clone()));
        }
        for (conn, _) in waiting {
            self.notify(Some(conn), Notice::NotReady(text.clone()));
        }
    }

    /// Answers the requests that wait for a context, if it is ready.
    pub(super) fn answer_waiting(&mut self, key: Key) {
        let context = self.contexts.get_mut(key);
        let Some(context) = context.filter(|context| context.is_ready()) else {
            return;
        };
        for (conn, answer) in std::mem::take(&mut context.waiting) {
            self.notify(Some(conn), Notice::Ready(answer));
        }
    }

    /// Replaces the host. The running cell ends with an error; waiting cells run on the new host.
    pub(super) fn restart_context(&mut self, key: Key) {
        let answered = self.contexts.get(key).and_then(Context::answered);
        self.end_host(key);
        self.notify(answered, Notice::Restarted);
        self.start_host(key);
    }

    /// Ends the context with its running and waiting cells.
    pub(super) fn remove_context(&mut self, key: Key) {
        self.end_host(key);
        let Some(mut context) = self.contexts.remove(key) else {
            return;
        };
        self.notify(context.answered(), Notice::HostDied);
        for job in std::mem::take(&mut context.queue) {
            self.notify(Some(job.conn), Notice::HostDied);
        }
        for (conn, _) in context.waiting {
            let text = "the context was removed".to_owned();
            self.notify(Some(conn), Notice::NotReady(text));
        }
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
