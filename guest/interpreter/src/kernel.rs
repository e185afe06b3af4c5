//! The host of Jupyter kernels: a bridge process between the server and one kernel of any language.
//!
//! ```text
//! server ── control socket (message) ── bridge ── shell, control (DEALER), iopub (SUB) ── kernel
//!    └──────────── stdout, stderr: output of the kernel's children ──────────────────────────┘
//! ```
//! A kernel is started on first use, never before the template's snapshot, with a random key. A fork of a sandbox
//! has the same key and ports as the original; each is reachable only inside its sandbox.
//!
//! Invariants: no bridge outlives its kernel, and no kernel outlives its bridge.

mod control;
mod display;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod process;
mod snippets;
mod spec;
mod wire;
mod zmtp;

use std::{
    collections::BTreeMap,
    io,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use control::Control;
use display::Weight;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{SigSet, Signal, killpg},
    sys::signalfd::{SfdFlags, SignalFd},
    unistd::getpgrp,
};
use process::{Connected, Process, StartError};
use serde_json::{Value, json};
use snippets::Changes;
use spec::{InterruptMode, Spec, SpecError};
use wire::{Message, Session};
use zmtp::Socket;

pub(crate) use spec::{Kernel, find};

use crate::{
    clone_state::Variables,
    event::{Event, now},
    message::{Request, is_name},
};

/// Size of the read buffer in bytes.
const SCRATCH: usize = 64 << 10;
/// A cell ends with a reply and an idle status. An interrupt just before the cell's code runs, or while the kernel
/// reports its end, may suppress one of them (in ipykernel, the reply). After an interrupt, the cell therefore also
/// ends if only one of the two has arrived and the other does not follow within this time.
const HALF_END: Duration = Duration::from_secs(2);

/// The bridge cannot continue. Usually the kernel has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KernelError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("cannot start the kernel")]
    Start(#[from] StartError),
    #[error("the kernel has ended, or uses an unknown protocol")]
    Kernel(#[source] io::Error),
    #[error("the server has closed the control socket")]
    Server(#[source] io::Error),
}

/// Runs cells until the server closes the control socket or the kernel ends. The kernelspec is in `dir`.
pub(crate) fn run(dir: &Path) -> Result<(), KernelError> {
    let spec = Spec::load(dir)?;
    let interrupts = take_interrupts().map_err(KernelError::Server)?;
    let mut control = Control::take_standard_input().map_err(KernelError::Server)?;
    let mut session = Session::new().map_err(StartError::from)?;
    let Connected {
        process,
        shell,
        orders,
        news,
    } = process::start(&spec, dir, &mut session)?;
    control
        .send_line("{\"ready\":true}")
        .map_err(KernelError::Server)?;
    let mut bridge = Bridge {
        control,
        interrupts,
        mode: spec.interrupt_mode,
        language: snippets::Language::of(&spec.language),
        variables: process.variables.clone(),
        _process: process,
        session,
        shell,
        orders,
        news,
        scratch: vec![0; SCRATCH],
        asked: 0,
        seeded: false,
    };
    loop {
        let request = bridge.control.next_request();
        let Some(request) = request.map_err(KernelError::Server)? else {
            return Ok(());
        };
        bridge.cell(&request)?;
    }
}

/// Blocks SIGINT and returns a descriptor from which it can be read, because interrupts are meant for the kernel.
fn take_interrupts() -> io::Result<SignalFd> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    Ok(SignalFd::with_flags(
        &signals,
        SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK,
    )?)
}

struct Bridge {
    control: Control,
    interrupts: SignalFd,
    mode: InterruptMode,
    language: snippets::Language,
    /// The kernel's environment, as set by its start and by the server.
    variables: Variables,
    _process: Process,
    session: Session,
    shell: Socket,
    /// Connection to the kernel's control socket.
    orders: Socket,
    /// Connection to the kernel's iopub socket.
    news: Socket,
    scratch: Vec<u8>,
    /// Interrupts of the current cell that have not been sent to the kernel.
    asked: u32,
    /// Whether the server has requested a seeding. The first request is ignored, because the kernel has just started.
    seeded: bool,
}

/// The destination of messages that a request causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Audience {
    Client,
    Nobody,
}

/// The progress of a request.
#[derive(Default)]
struct Progress {
    /// Whether the kernel has sent more than the busy status.
    begun: bool,
    replied: bool,
    idle: bool,
    failed: bool,
    interrupted: bool,
    /// When the first of `replied` and `idle` was set.
    half: Option<Instant>,
}

impl Progress {
    fn is_over(&self) -> bool {
        self.replied && self.idle || self.left() == Some(Duration::ZERO)
    }

    /// How much longer to wait for the second of `replied` and `idle` after an interrupt; `None` if there is no limit.
    fn left(&self) -> Option<Duration> {
        let half = self.half.filter(|_| self.interrupted)?;
        Some(HALF_END.saturating_sub(half.elapsed()))
    }
}

impl Bridge {
    fn cell(&mut self, request: &Request) -> Result<(), KernelError> {
        self.asked = 0;
        if request.seed && std::mem::replace(&mut self.seeded, true) {
            self.whisper(self.language.seed().map(str::to_owned))?;
        }
        if let Some(base) = &request.base {
            let changes = changes(&self.variables, base);
            let told = self.change(&changes)?;
            if told {
                apply(&mut self.variables, &changes);
            }
        }
        let (set, undo) = for_one_cell(&self.variables, &request.env);
        if self.change(&set)? {
            self.execute(&request.code, Audience::Client, !request.unstored)?;
            self.change(&undo)?;
        } else {
            self.refuse_variables()?;
        }
        self.send_line("{\"done\":true}")
    }

    /// Changes variables of the kernel. If the kernel's language is not supported, changes nothing and returns false.
    fn change(&mut self, changes: &Changes) -> Result<bool, KernelError> {
        if changes.is_empty() {
            return Ok(true);
        }
        match self.language.change(changes) {
            Some(code) => self.whisper(Some(code)).map(|()| true),
            None => Ok(false),
        }
    }

    fn refuse_variables(&mut self) -> Result<(), KernelError> {
        let value = "variables cannot be set in a running kernel of this language: \
             give them when the sandbox is created";
        self.send_event(&Event::Error {
            name: "EnvironmentError",
            value,
            traceback: value,
        })
    }

    /// Runs code and discards its output.
    fn whisper(&mut self, code: Option<String>) -> Result<(), KernelError> {
        match code {
            Some(code) => self.execute(&code, Audience::Nobody, false),
            None => Ok(()),
        }
    }

    /// Runs code until the kernel has sent its reply and all messages of the request.
    fn execute(&mut self, code: &str, audience: Audience, stored: bool) -> Result<(), KernelError> {
        let heard = audience == Audience::Client;
        let content = json!({
            "code": code, "silent": !heard, "store_history": stored, "user_expressions": {},
            "allow_stdin": false, "stop_on_error": false,
        });
        let (id, parts) = self.session.request("execute_request", &content);
        self.shell.send(&parts).map_err(KernelError::Kernel)?;
        let mut progress = Progress::default();
        while !progress.is_over() {
            let ready = self.wait(progress.left())?;
            let [shell, orders, news, interrupts] = ready;
            if interrupts && self.take_interrupt() {
                self.asked += 1;
            }
            if news {
                for message in receive(&mut self.news, &self.session, &mut self.scratch)? {
                    if message.parent == id {
                        self.hear(&message, audience, &mut progress)?;
                    }
                }
            }
            if shell {
                for message in receive(&mut self.shell, &self.session, &mut self.scratch)? {
                    if message.parent == id && message.kind == "execute_reply" {
                        progress.replied = true;
                        self.reply(&message.content, audience, &mut progress)?;
                    }
                }
            }
            if orders {
                // Replies to interrupt requests carry no information.
                receive(&mut self.orders, &self.session, &mut self.scratch)?;
            }
            if progress.half.is_none() && (progress.replied || progress.idle) {
                progress.half = Some(Instant::now());
            }
            if heard && self.is_time_to_interrupt(&progress) {
                self.asked = 0;
                progress.interrupted = true;
                self.interrupt()?;
            }
        }
        if !progress.replied && heard && !progress.failed {
            self.error(&json!({"ename": "KeyboardInterrupt", "evalue": ""}))?;
        }
        Ok(())
    }

    /// Waits for the kernel or an interrupt, at most `limit`. Returns whether the sockets shell, control and iopub, and
    /// the interrupts, are ready, in this order.
    fn wait(&self, limit: Option<Duration>) -> Result<[bool; 4], KernelError> {
        let mut fds = [
            self.shell.as_fd(),
            self.orders.as_fd(),
            self.news.as_fd(),
            self.interrupts.as_fd(),
        ]
        .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        // Rounded up, so that the limit has passed if nothing arrives.
        let limit = limit.map_or(PollTimeout::NONE, |limit| {
            PollTimeout::try_from(limit + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, limit) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(KernelError::Kernel(errno.into())),
        }
        Ok(fds.map(|fd| fd.any() == Some(true)))
    }

    /// Whether the server has sent an interrupt. Signals that this process sends to its own group are ignored.
    fn take_interrupt(&mut self) -> bool {
        let mut asked = false;
        while let Ok(Some(signal)) = self.interrupts.read_signal() {
            asked |= signal.ssi_pid != std::process::id();
        }
        asked
    }

    /// Whether to send pending interrupts to the kernel now. A kernel may ignore signals until it has begun a cell
    /// (ipykernel does), and after its first end message nothing is left to interrupt. A second interrupt is sent even
    /// if the cell has not begun.
    fn is_time_to_interrupt(&self, progress: &Progress) -> bool {
        let hears = progress.begun && self.asked > 0 || self.asked > 1;
        hears && progress.half.is_none()
    }

    fn interrupt(&mut self) -> Result<(), KernelError> {
        match self.mode {
            InterruptMode::Message => {
                let (_, parts) = self.session.request("interrupt_request", &json!({}));
                self.orders.send(&parts).map_err(KernelError::Kernel)?;
            }
            // The process group of the bridge, which includes the kernel. The bridge itself ignores this signal
            // (`take_interrupt`).
            InterruptMode::Signal => drop(killpg(getpgrp(), Signal::SIGINT)),
        }
        Ok(())
    }

    fn hear(
        &mut self,
        message: &Message,
        audience: Audience,
        progress: &mut Progress,
    ) -> Result<(), KernelError> {
        let content = &message.content;
        if message.kind == "status" {
            progress.idle |= content["execution_state"] == "idle";
            return Ok(());
        }
        progress.begun = true;
        if audience == Audience::Nobody {
            return Ok(());
        }
        match message.kind.as_str() {
            "stream" => {
                let (text, timestamp) = (content["text"].as_str().unwrap_or_default(), now());
                self.send_event(&match content["name"].as_str() {
                    Some("stderr") => Event::Stderr { text, timestamp },
                    _ => Event::Stdout { text, timestamp },
                })
            }
            "execute_result" => self.send_line(&display::result(content, Weight::Main)),
            "display_data" => self.send_line(&display::result(content, Weight::Aside)),
            "error" => {
                progress.failed = true;
                self.error(content)
            }
            // Other types update what a graphical client displays.
            _ => Ok(()),
        }
    }

    /// Handles a reply. If the kernel aborted the cell, sends an error, because the kernel itself sends none.
    fn reply(
        &mut self,
        content: &Value,
        audience: Audience,
        progress: &mut Progress,
    ) -> Result<(), KernelError> {
        let status = content["status"].as_str().unwrap_or_default();
        if status == "aborted" && audience == Audience::Client && !progress.failed {
            self.error(&json!({"ename": "Aborted", "evalue": "the cell was not run"}))?;
        }
        Ok(())
    }

    fn error(&mut self, content: &Value) -> Result<(), KernelError> {
        let text = |name: &str| content[name].as_str().unwrap_or_default();
        let lines = content["traceback"].as_array();
        let lines = lines.map(|lines| lines.iter().filter_map(Value::as_str));
        let traceback: Vec<&str> = lines.map(Iterator::collect).unwrap_or_default();
        self.send_event(&Event::Error {
            name: text("ename"),
            value: text("evalue"),
            traceback: &traceback.join("\n"),
        })
    }

    fn send_event(&mut self, event: &Event<'_>) -> Result<(), KernelError> {
        let line = event.line();
        self.control.send(&line).map_err(KernelError::Server)
    }

    fn send_line(&mut self, line: &str) -> Result<(), KernelError> {
        self.control.send_line(line).map_err(KernelError::Server)
    }
}

fn receive(
    socket: &mut Socket,
    session: &Session,
    scratch: &mut [u8],
) -> Result<Vec<Message>, KernelError> {
    socket.receive(scratch).map_err(KernelError::Kernel)?;
    let mut messages = Vec::new();
    while let Some(parts) = socket.next_message().map_err(KernelError::Kernel)? {
        messages.extend(session.read(&parts));
    }
    Ok(messages)
}

/// The changes that make `base` effective. Variables that are not in `base` stay: they are the kernel's own.
fn changes(now: &Variables, base: &Variables) -> Changes {
    let named = base.iter().filter(|(name, _)| is_name(name));
    named
        .filter(|(name, value)| now.get(*name) != Some(*value))
        .map(|(name, value)| (name.clone(), Some(value.clone())))
        .collect()
}

fn apply(variables: &mut Variables, changes: &Changes) {
    for (name, value) in changes {
        match value {
            Some(value) => drop(variables.insert(name.clone(), value.clone())),
            None => drop(variables.remove(name)),
        }
    }
}

/// The changes for the variables of one cell, and the changes that undo them.
fn for_one_cell(variables: &Variables, env: &Variables) -> (Changes, Changes) {
    let set: Changes = changes(&BTreeMap::new(), env);
    let before = |name: &String| (name.clone(), variables.get(name).cloned());
    let undo = set.keys().map(before).collect();
    (set, undo)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        let own = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        pairs.iter().map(own).collect()
    }

    #[test]
    fn variables_of_a_cell_are_undone() {
        let mut now = variables(&[("A", "1"), ("PATH", "/bin")]);
        let (set, undo) =
            for_one_cell(&now, &variables(&[("A", "2"), ("B", "3"), ("no name", "")]));
        apply(&mut now, &set);
        assert_eq!(now, variables(&[("A", "2"), ("B", "3"), ("PATH", "/bin")]));
        apply(&mut now, &undo);
        assert_eq!(now, variables(&[("A", "1"), ("PATH", "/bin")]));
        assert!(changes(&now, &variables(&[("A", "1")])).is_empty());
    }
}
