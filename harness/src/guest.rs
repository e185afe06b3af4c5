//! Runs commands through the guest agent, and cells through the interpreter.

use std::{path::Path, time::Duration};

use envd::{ClientError, ENVD_PORT, EnvdClient, ExecRequest, InitRequest, Transport};
use model::chain;

use serde::Deserialize;
use serde_json::json;
use testbed::api::INTERPRETER_PORT;

use crate::{
    event::{Failure, FailureCause},
    scenario::ExecSpec,
    target::Output,
};

/// Timeout for writing a file into a guest.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a command or a cell in the guest behind a vsock socket, on a new connection.
///
/// # Errors
/// Returns an error if the agent or the interpreter cannot be reached, rejects the request or exceeds the
/// timeout.
pub(crate) fn exec(vsock: &Path, command: &ExecSpec) -> Result<Output, Failure> {
    let connect = |e: ClientError| failure(FailureCause::Connect, &e);
    let mut client = EnvdClient::connect(vsock, ENVD_PORT, command.timeout).map_err(connect)?;
    let Some(code) = &command.cell else {
        return exec_over(&mut client, command);
    };
    let tunnel = client.tunnel(INTERPRETER_PORT).map_err(connect)?;
    let mut interpreter = EnvdClient::over(tunnel.stream, command.timeout);
    cell_over(&mut interpreter, code, command)
}

/// Writes a file that is owned by root into the guest behind a vsock socket.
///
/// # Errors
/// Returns an error if the agent cannot be reached or rejects the request.
pub(crate) fn write_file(vsock: &Path, path: &str, bytes: &[u8]) -> Result<(), Failure> {
    EnvdClient::connect(vsock, ENVD_PORT, WRITE_TIMEOUT)
        .map_err(|e| failure(FailureCause::Connect, &e))?
        .write_file(path, bytes, Some("root"))
        .map_err(|e| failure(FailureCause::Exec, &e))
}

/// Requests that the guest's agent brings up the network interface. The guest must already have its identity.
///
/// # Errors
/// Returns an error if the agent cannot be reached or rejects the request.
pub(crate) fn switch_network_on(vsock: &Path, timeout: Duration) -> Result<(), Failure> {
    let init = InitRequest {
        network: Some(true),
        ..InitRequest::default()
    };
    EnvdClient::connect(vsock, ENVD_PORT, timeout)
        .and_then(|mut agent| agent.init(&init))
        .map_err(|e| failure(FailureCause::Identity, &e))
}

/// Runs a command through an open connection to the agent.
///
/// # Errors
/// Returns an error if the agent or a proxy in front of it rejects the request, or if the request fails or
/// times out.
pub(crate) fn exec_over<S: Transport>(
    client: &mut EnvdClient<S>,
    command: &ExecSpec,
) -> Result<Output, Failure> {
    let request = ExecRequest {
        cmd: command.argv.first().cloned().unwrap_or_default(),
        args: command.argv.get(1..).unwrap_or_default().to_vec(),
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

/// Runs a cell through an open connection to the interpreter.
///
/// # Errors
/// Returns an error if the interpreter or a proxy in front of it rejects the request, if the request fails
/// or times out, or if the response is invalid or incomplete.
pub(crate) fn cell_over<S: Transport>(
    client: &mut EnvdClient<S>,
    code: &str,
    command: &ExecSpec,
) -> Result<Output, Failure> {
    client.set_timeout(command.timeout);
    let body = match &command.language {
        None => json!({ "code": code }),
        Some(language) => json!({ "code": code, "language": language }),
    }
    .to_string();
    let json = [("content-type", "application/json")];
    let answer = client
        .request("POST", "/execute", &json, body.as_bytes())
        .map_err(|e| failure(FailureCause::Exec, &e))?;
    if answer.status != 200 {
        let text: String = String::from_utf8_lossy(&answer.body)
            .chars()
            .take(300)
            .collect();
        return Err(cell_failure(format!("status {}: {text}", answer.status)));
    }
    cell_output(&answer.body)
}

/// One line of a cell's response, reduced to the fields used here.
#[derive(Deserialize)]
struct CellEvent {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    is_main_result: bool,
    #[serde(default)]
    traceback: Option<String>,
}

/// Converts a cell's response. Standard output is the printed output followed by the text of the main result. A
/// traceback is appended to standard error and leaves no status.
fn cell_output(lines: &[u8]) -> Result<Output, Failure> {
    let mut output = Output {
        status: Some(0),
        stdout: Vec::new(),
        stderr: Vec::new(),
    };
    let (mut result, mut ended) = (None, false);
    for line in lines.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
        let event: CellEvent = serde_json::from_slice(line)
            .map_err(|e| cell_failure(format!("invalid event: {e}")))?;
        let text = event.text.unwrap_or_default();
        match event.kind.as_str() {
            "stdout" => output.stdout.extend_from_slice(text.as_bytes()),
            "stderr" => output.stderr.extend_from_slice(text.as_bytes()),
            "result" if event.is_main_result => result = Some(text),
            "error" => {
                output.status = None;
                output
                    .stderr
                    .extend(event.traceback.unwrap_or_default().into_bytes());
            }
            "end_of_execution" => ended = true,
            // Execution counts, results that are not the main result, and unknown events of newer servers are ignored.
            _ => {}
        }
    }
    output
        .stdout
        .extend(result.unwrap_or_default().into_bytes());
    if ended {
        Ok(output)
    } else {
        Err(cell_failure(
            "the response ended before the cell did".to_owned(),
        ))
    }
}

fn cell_failure(what: String) -> Failure {
    Failure {
        cause: FailureCause::Exec,
        message: format!("cell: {what}"),
    }
}

/// Converts an error of the client into a failure with the cause `step`, or [`FailureCause::Timeout`] for a timeout.
pub(crate) fn failure(step: FailureCause, error: &ClientError) -> Failure {
    let cause = match error {
        ClientError::Timeout(_) => FailureCause::Timeout,
        ClientError::NotReachable { .. }
        | ClientError::Local { .. }
        | ClientError::Refused { .. }
        | ClientError::Protocol(_) => step,
    };
    Failure {
        cause,
        message: format!("{}: {}", step.name(), chain(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_a_cell_is_its_printed_text_and_then_its_result() {
        let lines = concat!(
            "{\"type\":\"number_of_executions\",\"execution_count\":1}\n",
            "{\"type\":\"stdout\",\"text\":\"a\\n\",\"timestamp\":1}\n",
            "{\"type\":\"result\",\"text\":\"shown\",\"is_main_result\":false}\n",
            "{\"type\":\"result\",\"text\":\"2\",\"is_main_result\":true}\n",
            "{\"type\": \"end_of_execution\"}\n",
        );
        let output = cell_output(lines.as_bytes()).unwrap();
        assert_eq!(
            (output.status, output.stdout.as_slice()),
            (Some(0), &b"a\n2"[..])
        );
        let cut = &lines.as_bytes()[..lines.len() - 30];
        assert_eq!(cell_output(cut).unwrap_err().cause, FailureCause::Exec);
        let error = concat!(
            "{\"type\":\"error\",\"name\":\"E\",\"value\":\"v\",\"traceback\":\"E: v\"}\n",
            "{\"type\":\"end_of_execution\"}\n",
        );
        let output = cell_output(error.as_bytes()).unwrap();
        assert_eq!(
            (output.status, output.stderr.as_slice()),
            (None, &b"E: v"[..])
        );
    }
}
