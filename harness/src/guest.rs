//! Commands inside a guest, through its agent.

use std::path::Path;

use api_types::chain;
use api_types::envd::{ClientError, ENVD_PORT, EnvdClient, ExecRequest, Transport};

use crate::{
    event::{Failure, FailureCause},
    scenario::ExecSpec,
    target::Output,
};

/// Runs a command in the guest behind a clone's vsock socket, on a connection of its own.
///
/// # Errors
/// The agent cannot be reached or refuses.
pub(crate) fn exec(vsock: &Path, command: &ExecSpec) -> Result<Output, Failure> {
    let mut client = EnvdClient::connect(vsock, ENVD_PORT, command.timeout)
        .map_err(|e| failure(FailureCause::Connect, &e))?;
    exec_over(&mut client, command)
}

/// The same on a connection that is open.
///
/// # Errors
/// The agent, or who stands before it, refuses.
pub(crate) fn exec_over<S: Transport>(
    client: &mut EnvdClient<S>,
    command: &ExecSpec,
) -> Result<Output, Failure> {
    let request = ExecRequest {
        cmd: command.argv[0].clone(),
        args: command.argv[1..].to_vec(),
        user: Some(command.user.clone()),
        stdin: Some(false),
        ..ExecRequest::default()
    };
    let output = client
        .exec(&request, command.timeout)
        .map_err(|e| failure(FailureCause::Exec, &e))?;
    Ok(Output {
        status: output.exited.then_some(output.exit_code),
        stdout: output.stdout,
        stderr: output.stderr,
    })
}

/// What a client's error means for the step that it broke.
pub(crate) fn failure(step: FailureCause, error: &ClientError) -> Failure {
    let cause = match error {
        ClientError::Timeout(_) => FailureCause::Timeout,
        ClientError::NotReachable { .. }
        | ClientError::Refused { .. }
        | ClientError::Protocol(_) => step,
    };
    Failure {
        cause,
        message: format!("{}: {}", step.name(), chain(error)),
    }
}
