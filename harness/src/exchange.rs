//! What a sandbox and a peer outside do with each other, and what the peer makes of it.
//!
//! Each exchange has a listener of its own outside, at a port that nobody else uses: who comes there is the sandbox. All
//! times are the peer's. The sandbox's end is `cube-netprobe`, which tells no times; that it says it is done proves
//! nothing but that it was there.

mod churn;
mod peer;
mod place;

use std::{
    io,
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use netprobe::{Action, Finding, Order, Outcome, Probe};
use nix::sched::CpuSet;

use testbed::world::{Namespace, WorldError, failed};

use crate::{
    event::{Exchanged, Failure, FailureCause},
    scenario::{ExchangeSpec, ExecSpec, NetworkSpec},
    target::{Sandbox, exec_and_compare, exec_checked},
};
use peer::Listener;

/// Where the probe is put.
pub(crate) const PROBE: &str = "/usr/local/bin/cube-netprobe";
/// Who may be reached, and who may not.
const ALLOWED: [u8; 4] = [198, 51, 100, 20];
const DENIED: [u8; 4] = [203, 0, 113, 20];
/// Where they are.
const BLOCKS: [&str; 2] = ["198.51.100.0/24", "203.0.113.0/24"];
/// A name server that nobody is: sandboxes of scenarios ask for no names.
pub(crate) const NAME_SERVER: &str = "198.51.100.53:53";
/// What must not be answered is waited for as long.
const DENIED_MS: u64 = 1000;
/// In the first command: the peer's address and port.
const PEER: [&str; 2] = ["{peer}", "{port}"];

/// The network around the sandboxes of a run.
#[derive(Debug)]
pub struct Network {
    outside: Namespace,
    spec: NetworkSpec,
    /// The probe's bytes.
    program: Vec<u8>,
    /// Where both ends of exchanges run; absent where the scheduler may choose.
    cpu: Option<CpuSet>,
}

/// Where both ends of exchanges run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// On one CPU, for comparisons.
    OneCpu,
    /// Where the scheduler puts them.
    Free,
}

/// The first command of one sandbox, with a peer that waits for it if it asks for one.
#[derive(Debug)]
pub(crate) struct FirstCommand {
    command: ExecSpec,
    listener: Option<Listener>,
}

impl FirstCommand {
    /// Listens outside before there is a sandbox, so that no time of its start is spent on it.
    pub(crate) fn prepare(command: &ExecSpec, network: Option<&Network>) -> Result<Self, Failure> {
        let asks = |word: &String| PEER.iter().any(|name| word.contains(name));
        let network = network.filter(|_| command.argv.iter().any(asks));
        let listener = network.map(|network| network.listen(ALLOWED)).transpose()?;
        let mut command = command.clone();
        if let Some(at) = listener.as_ref().map(Listener::address) {
            let values = [at.ip().to_string(), at.port().to_string()];
            for (name, value) in PEER.iter().zip(values) {
                for word in &mut command.argv {
                    *word = word.replace(name, &value);
                }
            }
        }
        Ok(Self { command, listener })
    }

    /// Runs it; when its first byte arrived outside, if it had a peer.
    pub(crate) fn run(self, sandbox: &mut dyn Sandbox) -> Result<Option<u64>, Failure> {
        let Self { command, listener } = self;
        let Some(listener) = listener else {
            return exec_and_compare(sandbox, &command).map(|()| None);
        };
        let (heard, done) = while_listening(&listener, command.timeout, peer::answer_line, || {
            exec_and_compare(sandbox, &command)
        });
        done?;
        heard
            .map(Some)
            .map_err(|e| lost(format!("nothing came from {}: {e}", command.describe())))
    }
}

impl Network {
    /// Moves this process into namespaces of its own for good. No thread may run yet.
    ///
    /// # Errors
    /// See [`WorldError`].
    pub(crate) fn enter(
        spec: NetworkSpec,
        program: Vec<u8>,
        placement: Placement,
    ) -> Result<Self, WorldError> {
        let cpu = match placement {
            Placement::Free => None,
            Placement::OneCpu => Some(place::last_cpu().map_err(failed("choose a CPU"))?),
        };
        Ok(Self {
            outside: testbed::world::enter(BLOCKS)?,
            spec,
            program,
            cpu,
        })
    }

    pub(crate) fn outside(&self) -> &Namespace {
        &self.outside
    }

    /// Puts the probe into a sandbox, and the sandbox where it is to run.
    pub(crate) fn put_probe(
        &self,
        sandbox: &mut dyn Sandbox,
        like: &ExecSpec,
    ) -> Result<(), Failure> {
        if let Some((cpu, pid)) = self.cpu.as_ref().zip(sandbox.pid()) {
            place::pin_process(pid, cpu)
                .map_err(|e| lost(format!("the VMM cannot be put on a CPU: {e}")))?;
        }
        sandbox.write_file(PROBE, &self.program)?;
        exec_and_compare(sandbox, &command(&["/bin/chmod", "755", PROBE], like))
    }

    /// Carries one out. `like` has user and bound.
    pub(crate) fn exchange(
        &self,
        sandbox: &mut dyn Sandbox,
        exchange: ExchangeSpec,
        like: &ExecSpec,
    ) -> Result<Option<Exchanged>, Failure> {
        match exchange {
            ExchangeSpec::Echo { count, repeat } => self
                .repeated(sandbox, repeat, like, Action::Echo, |s| {
                    peer::echo(s, count)
                })
                .map(Some),
            ExchangeSpec::Send { bytes, repeat } => self
                .repeated(sandbox, repeat, like, Action::Source, |s| {
                    peer::take(s, bytes)
                })
                .map(Some),
            ExchangeSpec::Receive { bytes, repeat } => self
                .repeated(sandbox, repeat, like, Action::Sink, |s| {
                    peer::give(s, bytes)
                })
                .map(Some),
            ExchangeSpec::Denied => self.denied(sandbox, like).map(|()| None),
            ExchangeSpec::Churn { count, every } => {
                churn::carry_out(self, sandbox, count, every, like).map(Some)
            }
        }
    }

    /// So many times over a connection of its own; the times of all.
    fn repeated(
        &self,
        sandbox: &mut dyn Sandbox,
        repeat: u32,
        like: &ExecSpec,
        action: fn(SocketAddr) -> Action,
        work: impl Fn(TcpStream) -> io::Result<Exchanged> + Send + Sync,
    ) -> Result<Exchanged, Failure> {
        let mut all = Exchanged::default();
        for _ in 0..repeat {
            let one = self.measured(sandbox, like, action, &work)?;
            all.bytes = one.bytes;
            all.times_ns.extend(one.times_ns);
        }
        Ok(all)
    }

    /// The sandbox connects outwards and does its part while `work` measures.
    fn measured(
        &self,
        sandbox: &mut dyn Sandbox,
        like: &ExecSpec,
        action: fn(SocketAddr) -> Action,
        work: impl FnOnce(TcpStream) -> io::Result<Exchanged> + Send,
    ) -> Result<Exchanged, Failure> {
        let listener = self.listen(ALLOWED)?;
        let order = order(action(listener.address()), like.timeout);
        let work = |stream| {
            self.cpu.as_ref().map_or(Ok(()), place::pin_thread)?;
            work(stream)
        };
        let (measured, told) = while_listening(&listener, like.timeout, work, || {
            probe(sandbox, &order, like)
        });
        let told = told?;
        if told.outcome != Outcome::Ok {
            return Err(lost(format!("{}: {}", told.outcome.name(), told.said)));
        }
        measured.map_err(|e| lost(format!("the peer outside: {e}")))
    }

    /// Nobody may answer, and nobody may hear of it.
    fn denied(&self, sandbox: &mut dyn Sandbox, like: &ExecSpec) -> Result<(), Failure> {
        let listener = self.listen(DENIED)?;
        let within = Duration::from_millis(DENIED_MS);
        let told = probe(
            sandbox,
            &order(Action::Tcp(listener.address()), within),
            like,
        )?;
        let heard = listener
            .has_caller()
            .map_err(|e| lost(format!("the peer outside: {e}")))?;
        match (heard, told.outcome) {
            (false, Outcome::Refused | Outcome::Timeout | Outcome::Unreachable) => Ok(()),
            (false, Outcome::Failed) => Err(lost(format!("could not be tried: {}", told.said))),
            (true, outcome) => Err(breach(format!(
                "{} was reached, the sandbox says {}",
                listener.address(),
                outcome.name()
            ))),
            (false, Outcome::Ok) => Err(breach(format!("{} answered", listener.address()))),
        }
    }

    fn listen(&self, at: [u8; 4]) -> Result<Listener, Failure> {
        self.outside
            .within(|| Listener::bind(at.into()))
            .map_err(|e| lost(format!("cannot listen outside: {e}")))
    }
}

/// Lets a peer do its work with the first that connects, while the sandbox does its own; both results. Once the sandbox
/// is done nobody else is waited for.
fn while_listening<T: Send, U>(
    listener: &Listener,
    patience: Duration,
    work: impl FnOnce(TcpStream) -> io::Result<T> + Send,
    act: impl FnOnce() -> U,
) -> (io::Result<T>, U) {
    thread::scope(|scope| {
        let peer = scope.spawn(|| work(listener.accept(patience)?));
        let acted = act();
        listener.close();
        let worked = peer
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (worked, acted)
    })
}

/// A command with the user and the bound of another.
fn command(argv: &[&str], like: &ExecSpec) -> ExecSpec {
    ExecSpec {
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        cell: None,
        user: "root".to_owned(),
        expect_stdout: String::new(),
        timeout: like.timeout,
    }
}

fn order(action: Action, within: Duration) -> Order {
    Order {
        probes: vec![Probe {
            name: "exchange".to_owned(),
            first: Vec::new(),
            action,
            within_ms: u64::try_from(within.as_millis()).unwrap_or(u64::MAX),
        }],
    }
}

fn text_of(order: &Order) -> Result<String, Failure> {
    serde_json::to_string(order).map_err(|e| lost(format!("an order cannot be written: {e}")))
}

/// What the probe says of its one attempt.
fn probe(sandbox: &mut dyn Sandbox, order: &Order, like: &ExecSpec) -> Result<Finding, Failure> {
    let output = exec_checked(sandbox, &command(&[PROBE, &text_of(order)?], like))?;
    serde_json::from_slice(&output.stdout).map_err(|e| lost(format!("the probe's answer: {e}")))
}

/// What had to pass did not, or could not be measured.
fn lost(message: String) -> Failure {
    Failure {
        cause: FailureCause::Network,
        message: format!("exchange: {message}"),
    }
}

/// What must not pass did.
fn breach(message: String) -> Failure {
    Failure {
        cause: FailureCause::Breach,
        message: format!("exchange: {message}"),
    }
}
