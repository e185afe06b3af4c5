//! Exchanges: traffic between a sandbox and a peer in the outside namespace, measured by the peer.
//!
//! The peer is part of this process. Each exchange has its own socket outside, on a port that no other traffic
//! uses, so everything that arrives there comes from the sandbox. `cube-netprobe` runs in the sandbox and measures
//! nothing. Its report alone never proves that allowed traffic passed.

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

/// Path of the probe in a sandbox.
pub(crate) const PROBE: &str = "/usr/local/bin/cube-netprobe";
/// Address of peers that the policy allows.
const ALLOWED: [u8; 4] = [198, 51, 100, 20];
/// Address of peers that the policy denies.
const DENIED: [u8; 4] = [203, 0, 113, 20];
/// Address blocks of the namespace outside.
const BLOCKS: [&str; 2] = ["198.51.100.0/24", "203.0.113.0/24"];
/// Address for `--dns-server`. No server listens there, because no scenario resolves names in a sandbox.
pub(crate) const NAME_SERVER: &str = "198.51.100.53:53";
/// Timeout of the attempt to reach a denied destination.
const DENIED_MS: u64 = 1000;
/// Placeholders in the first command for the address and the port of its peer.
const PEER: [&str; 2] = ["{peer}", "{port}"];

/// The network of a run.
#[derive(Debug)]
pub struct Network {
    outside: Namespace,
    spec: NetworkSpec,
    /// Contents of `cube-netprobe`.
    program: Vec<u8>,
    /// CPU of the VMM and the peer during exchanges; `None` leaves the choice to the scheduler.
    cpu: Option<CpuSet>,
}

/// CPU placement of the two ends of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Both ends on one CPU, for comparisons.
    OneCpu,
    /// Chosen by the scheduler.
    Free,
}

/// The first command of one sandbox, with a peer if the command contains a placeholder of [`PEER`].
#[derive(Debug)]
pub(crate) struct FirstCommand {
    command: ExecSpec,
    listener: Option<Listener>,
}

impl FirstCommand {
    /// Opens the listener of the peer, if there is one, and fills in its address. Must be called before the sandbox is
    /// created, so that the measured start does not include this step.
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

    /// Runs the command. Returns the time at which its first byte arrived at the peer, in nanoseconds of
    /// CLOCK_MONOTONIC, or `None` without a peer.
    pub(crate) fn run(self, sandbox: &mut dyn Sandbox) -> Result<Option<u64>, Failure> {
        let Self { command, listener } = self;
        let Some(listener) = listener else {
            return exec_and_compare(sandbox, &command).map(|()| None);
        };
        let (heard, done) = while_listening(&listener, command.timeout, peer::answer_line, || {
            exec_and_compare(sandbox, &command)
        });
        done?;
        heard.map(Some).map_err(|e| {
            lost(format!(
                "no byte arrived outside from {}: {e}",
                command.describe()
            ))
        })
    }
}

impl Network {
    /// Moves the calling thread into a new network namespace, which is connected to a second one outside. Must be
    /// called before other threads are started, because existing threads keep their namespace.
    ///
    /// # Errors
    /// Returns [`WorldError`] if the namespaces or their links cannot be created, or no CPU can be chosen.
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

    /// Copies the probe into a sandbox. With [`Placement::OneCpu`], also pins the VMM to the CPU of the exchanges.
    /// `like` provides the timeout.
    pub(crate) fn put_probe(
        &self,
        sandbox: &mut dyn Sandbox,
        like: &ExecSpec,
    ) -> Result<(), Failure> {
        if let Some((cpu, pid)) = self.cpu.as_ref().zip(sandbox.pid()) {
            place::pin_process(pid, cpu)
                .map_err(|e| lost(format!("cannot pin VMM {pid} to a CPU: {e}")))?;
        }
        sandbox.write_file(PROBE, &self.program)?;
        exec_and_compare(sandbox, &command(&["/bin/chmod", "755", PROBE], like))
    }

    /// Runs an exchange. `like` provides the timeout. Returns `None` for a denied exchange, which has no measurements.
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

    /// Runs an exchange on `repeat` connections, one after the other, and returns the times of all of them.
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

    /// Runs an exchange on one connection: the sandbox connects to a new listener outside, and `work` measures on the
    /// accepted connection.
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

    /// Tries to reach a denied destination. Succeeds only if no connection arrived at the listener and the probe
    /// reports that its connection was refused, timed out or was unreachable.
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
            (false, Outcome::Failed) => Err(lost(format!(
                "the denied connection could not be tried: {}",
                told.said
            ))),
            (true, outcome) => Err(breach(format!(
                "{} was reached, the sandbox reports {}",
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

/// Runs `work` on the first connection to the listener while `act` runs in the sandbox, and returns both results. The
/// listener is closed when `act` returns; if no connection has arrived by then, the first result is an error.
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

/// A command that runs as root, with the timeout of `like`, and must print nothing.
fn command(argv: &[&str], like: &ExecSpec) -> ExecSpec {
    ExecSpec {
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        cell: None,
        language: None,
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
    serde_json::to_string(order)
        .map_err(|e| lost(format!("cannot encode the order for the probe: {e}")))
}

/// Runs the probe in the sandbox with an order for one attempt, and returns the finding that it prints.
fn probe(sandbox: &mut dyn Sandbox, order: &Order, like: &ExecSpec) -> Result<Finding, Failure> {
    let output = exec_checked(sandbox, &command(&[PROBE, &text_of(order)?], like))?;
    serde_json::from_slice(&output.stdout)
        .map_err(|e| lost(format!("cannot parse the output of the probe: {e}")))
}

/// A failure because allowed traffic did not pass, or could not be measured.
fn lost(message: String) -> Failure {
    Failure {
        cause: FailureCause::Network,
        message: format!("exchange: {message}"),
    }
}

/// A failure because denied traffic passed.
fn breach(message: String) -> Failure {
    Failure {
        cause: FailureCause::Breach,
        message: format!("exchange: {message}"),
    }
}
