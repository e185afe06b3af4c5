//! Records of calls. A record begins with a request or connection and is sent at its end, whatever the outcome.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use egress::control::{Call, Flow};
use hyper::{Method, StatusCode};

use super::link::Link;

const MAX_NAME: usize = 255;
const MAX_METHOD: usize = 64;
const MAX_PATH: usize = 1024;

/// Byte counts of one request or connection.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    out: AtomicU64,
    back: AtomicU64,
}

impl Traffic {
    pub(crate) fn count_out(&self, bytes: usize) {
        self.out.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_in(&self, bytes: usize) {
        self.back.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A record that is sent when it is dropped.
pub(crate) struct Record {
    link: Arc<Link>,
    began: Instant,
    traffic: Arc<Traffic>,
    /// `None` if it was discarded.
    call: Option<Call>,
}

impl Record {
    pub(crate) fn new(link: &Arc<Link>, flow: &Flow) -> Self {
        let call = Call {
            sandbox: flow.sandbox.clone(),
            time_ms: now_ms(),
            duration_ms: 0,
            remote: flow.remote,
            name: None,
            method: None,
            path: None,
            status: None,
            bytes_out: 0,
            bytes_in: 0,
            rule: None,
            secrets: Vec::new(),
            refused: None,
        };
        Self {
            link: Arc::clone(link),
            began: Instant::now(),
            traffic: Arc::default(),
            call: Some(call),
        }
    }

    pub(crate) fn traffic(&self) -> Arc<Traffic> {
        Arc::clone(&self.traffic)
    }

    pub(crate) fn name(&mut self, name: &str) {
        self.edit(|call| call.name = Some(shortened(name, MAX_NAME)));
    }

    pub(crate) fn request(&mut self, method: &Method, path: &str) {
        self.edit(|call| {
            call.method = Some(shortened(method.as_str(), MAX_METHOD));
            call.path = Some(shortened(path, MAX_PATH));
        });
    }

    pub(crate) fn status(&mut self, status: StatusCode) {
        self.edit(|call| call.status = Some(status.as_u16()));
    }

    pub(crate) fn rule(&mut self, rule: &str, secrets: Vec<String>) {
        self.edit(|call| {
            call.rule = Some(rule.to_owned());
            call.secrets = secrets;
        });
    }

    pub(crate) fn refused(&mut self, reason: &str) {
        self.edit(|call| call.refused = Some(shortened(reason, MAX_PATH)));
    }

    /// Sends nothing, because other records describe the connection.
    pub(crate) fn discard(mut self) {
        self.call = None;
    }

    fn edit(&mut self, edit: impl FnOnce(&mut Call)) {
        if let Some(call) = &mut self.call {
            edit(call);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let Some(mut call) = self.call.take() else {
            return;
        };
        let passed = self.began.elapsed().as_millis();
        call.duration_ms = u64::try_from(passed).unwrap_or(u64::MAX);
        call.bytes_out = self.traffic.out.load(Ordering::Relaxed);
        call.bytes_in = self.traffic.back.load(Ordering::Relaxed);
        self.link.record(call);
    }
}

/// Sends the record of a connection that was refused before any byte was read.
pub(crate) fn refuse_connection(link: &Arc<Link>, flow: &Flow, reason: &str) {
    Record::new(link, flow).refused(reason);
}

/// Logs a connection whose flow request failed.
pub(crate) fn log_unanswered(peer: SocketAddr, error: &super::link::LinkError) {
    tracing::warn!("closing the connection from {peer}: cannot look up its flow: {error}");
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

fn shortened(text: &str, limit: usize) -> String {
    let end = (0..=limit.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    text[..end.unwrap_or(0)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(shortened("abc", 5), "abc");
        assert_eq!(shortened("abc", 2), "ab");
        assert_eq!(shortened("a\u{fc}", 2), "a");
    }
}
