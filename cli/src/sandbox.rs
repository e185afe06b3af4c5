//! `cube sandbox`: sandboxes that live until they are killed or reach their deadline.

mod calls;
mod copy;
mod exec;
mod lifecycle;
mod list;
mod network;
mod observe;

use clap::{Args, Subcommand};

use crate::{context::Context, failure::Failure};

pub(crate) use calls::row as call_row;
use exec::{ExecArgs, ShellArgs, exec, shell};
pub(crate) use list::{all, info, print_ids};

#[derive(Subcommand, Debug)]
pub(crate) enum SandboxCommand {
    /// Start a sandbox and print its id
    Create(lifecycle::CreateArgs),
    /// List sandboxes, newest first
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    /// Show the properties of a sandbox
    Info(Id),
    /// End sandboxes, running or paused
    #[command(visible_alias = "rm")]
    Kill(lifecycle::KillArgs),
    /// Save a sandbox's memory and disk, and stop it
    Pause(lifecycle::PauseArgs),
    /// Continue a paused sandbox
    Resume(lifecycle::ResumeArgs),
    /// Start forks of a running sandbox, with its memory
    Fork(lifecycle::ForkArgs),
    /// Set the remaining time of a sandbox
    Timeout(lifecycle::TimeoutArgs),
    /// Run a command in a sandbox
    Exec(ExecArgs),
    /// Open a shell in a sandbox
    Shell(ShellArgs),
    /// Show events and console of a sandbox
    Logs(observe::LogsArgs),
    /// Show outbound calls through the egress proxy, and refusals
    Calls(calls::CallsArgs),
    /// Copy files and directories between this host and a sandbox
    Cp(copy::CopyArgs),
    /// Show CPU, memory and disk use of a sandbox
    Metrics(observe::MetricsArgs),
    /// Show or replace the outbound policy of a running sandbox
    Network(network::NetworkArgs),
    /// Print the URL of a port of a sandbox
    Url(network::UrlArgs),
}

/// A sandbox.
#[derive(Args, Debug)]
pub(crate) struct Id {
    /// Id of the sandbox
    #[arg(value_name = "ID")]
    pub(crate) id: String,
}

/// Runs a command. Returns the program's exit code for `exec` and `shell`, otherwise 0.
pub(crate) fn run(context: &Context, command: &SandboxCommand) -> Result<u8, Failure> {
    match command {
        SandboxCommand::Create(args) => lifecycle::create(context, args),
        SandboxCommand::List(args) => list::list(context, args),
        SandboxCommand::Info(id) => list::info(context, &id.id),
        SandboxCommand::Kill(args) => lifecycle::kill(context, args),
        SandboxCommand::Pause(args) => lifecycle::pause(context, args),
        SandboxCommand::Resume(args) => lifecycle::resume(context, args),
        SandboxCommand::Fork(args) => lifecycle::fork(context, args),
        SandboxCommand::Timeout(args) => lifecycle::timeout(context, args),
        SandboxCommand::Exec(args) => return exec(context, args),
        SandboxCommand::Shell(args) => return shell(context, args),
        SandboxCommand::Logs(args) => observe::logs(context, args),
        SandboxCommand::Calls(args) => calls::calls(context, args),
        SandboxCommand::Cp(args) => copy::copy(context, args),
        SandboxCommand::Metrics(args) => observe::metrics(context, args),
        SandboxCommand::Network(args) => network::network(context, args),
        SandboxCommand::Url(args) => network::url(context, args),
    }
    .map(|()| 0)
}

impl SandboxCommand {
    /// Whether the exit code is the exit code of a command in the sandbox.
    pub(crate) fn is_attached(&self) -> bool {
        matches!(self, Self::Exec(_) | Self::Shell(_))
    }
}
