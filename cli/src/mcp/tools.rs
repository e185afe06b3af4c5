//! The tools: their arguments, and what they do. Arguments come from a model, so all are checked before anything is sent.

mod code;
mod files;

use std::time::Duration;

use client::endpoint::Wire;
use envd::{
    ClientError, ENVD_PORT, Empty, EnvdClient, ExecRequest, ProcessSelector, SendSignalRequest,
    Signal, guest_text,
};
use rest::NetworkEvent;
use rmcp::model::{CallToolResult, ContentBlock, JsonObject, Tool};
use serde_json::Value;

use super::{output::Kept, sandboxes::Sandboxes, server::Stop};
use crate::{failure::Failure, output::time, sandbox::call_row};

/// Time of a call in seconds, unless it names another one.
const USUAL_TIME_S: u64 = 60;
/// Time for a response beyond the time of a command.
const SLACK: Duration = Duration::from_secs(10);
/// Maximum number of refusals in a result.
const MAX_EVENTS: usize = 100;
/// A login shell, as in E2B's SDKs: bash if the image has it.
const SHELL: &str =
    r#"if command -v bash >/dev/null; then exec bash -lc "$1"; else exec sh -lc "$1"; fi"#;

type Answer = Result<CallToolResult, Failure>;

/// A call whose arguments have been checked.
pub(super) struct Call<'a> {
    pub(super) sandboxes: &'a Sandboxes,
    pub(super) stop: &'a Stop,
    pub(super) arguments: JsonObject,
}

/// The tools as clients see them. Calls are checked against the same schemas.
pub(super) fn listed() -> Vec<Tool> {
    serde_json::from_str(include_str!("tools.json")).unwrap_or_default()
}

pub(super) fn run(tool: &Tool, call: &Call<'_>) -> Answer {
    if let Some(why) = mistake(&tool.input_schema, &call.arguments) {
        let why = format!("{}: {}", tool.name, guest_text(&why));
        return Err(
            Failure::usage(why).with_cure("the inputSchema of the tool lists its arguments")
        );
    }
    match tool.name.as_ref() {
        "create" => create(call),
        "exec" => exec(call),
        "run_code" => code::run(call),
        "read_file" => files::read(call),
        "write_file" => files::write(call),
        "list_files" => files::list(call),
        "fork" => fork(call),
        "snapshot" => snapshot(call),
        "network_log" => network_log(call),
        "list" => list(call),
        "kill" => kill(call),
        _ => Err(Failure::refused("the tool does not exist")),
    }
}

/// The first mistake in the arguments of a call. Null is as good as absent.
fn mistake(schema: &JsonObject, given: &JsonObject) -> Option<String> {
    let known = schema.get("properties")?.as_object()?;
    let required = schema.get("required")?.as_array()?;
    let is_missing = |name: &&str| given.get(*name).is_none_or(Value::is_null);
    let mut missing = required.iter().filter_map(Value::as_str).filter(is_missing);
    let present = given.iter().filter(|(_, value)| !value.is_null());
    let mut wrong = present.filter_map(|(name, value)| wrong(name, value, known.get(name)));
    wrong
        .next()
        .or_else(|| missing.next().map(|name| format!("{name} is missing")))
}

fn wrong(name: &String, value: &Value, schema: Option<&Value>) -> Option<String> {
    let Some(schema) = schema else {
        return Some(format!("there is no argument {name:?}"));
    };
    let bound = |key: &str| schema[key].as_u64().unwrap_or(0);
    match (schema["type"] == "integer", value.as_u64(), value.as_str()) {
        (true, number, _) => {
            let (least, most) = (bound("minimum"), bound("maximum"));
            let fits = number.is_some_and(|number| (least..=most).contains(&number));
            (!fits).then(|| format!("{name} is not a number from {least} to {most}"))
        }
        (false, _, None) => Some(format!("{name} is not text")),
        (false, _, Some(text)) if text.len() as u64 > bound("maxLength") => {
            let (length, most) = (text.len(), bound("maxLength"));
            Some(format!("{name} has {length} bytes, the maximum is {most}"))
        }
        // Names and commands, as opposed to contents.
        (false, _, Some(text)) => (bound("minLength") > 0
            && (text.is_empty() || text.contains('\0')))
        .then(|| format!("{name} is empty or contains NUL")),
    }
}

impl Call<'_> {
    /// The text of an argument. `None`: it is absent.
    fn text(&self, name: &str) -> Option<&str> {
        self.arguments.get(name)?.as_str()
    }

    /// The text of a required argument.
    fn needed(&self, name: &str) -> &str {
        self.text(name).unwrap_or_default()
    }

    fn sandbox(&self) -> &str {
        self.needed("sandbox")
    }

    /// Calls the agent of the sandbox.
    fn in_agent<T>(
        &self,
        call: impl FnOnce(&mut EnvdClient<Wire>) -> Result<T, ClientError>,
    ) -> Result<T, Failure> {
        let (sandbox, limit) = (self.sandbox(), self.limit());
        self.sandboxes.call(sandbox, ENVD_PORT, limit, call)
    }

    fn limit(&self) -> Duration {
        let given = self.arguments.get("timeout_s").and_then(Value::as_u64);
        Duration::from_secs(given.unwrap_or(USUAL_TIME_S))
    }
}

fn text(text: impl Into<String>) -> Answer {
    Ok(CallToolResult::success(vec![ContentBlock::text(text)]))
}

/// The texts that are not empty.
fn blocks(texts: impl IntoIterator<Item = String>) -> Vec<ContentBlock> {
    let texts = texts.into_iter().filter(|text| !text.is_empty());
    texts.map(ContentBlock::text).collect()
}

/// The text of standard error, marked as such.
fn marked(stderr: Kept) -> String {
    match stderr.into_text() {
        text if text.is_empty() => text,
        text => format!("stderr:\n{text}"),
    }
}

fn create(call: &Call<'_>) -> Answer {
    let made = call.sandboxes.create(call.text("snapshot"))?;
    let template = made.alias.unwrap_or(made.template_id);
    text(format!(
        "sandbox: {}\ntemplate: {template}",
        made.sandbox_id
    ))
}

fn exec(call: &Call<'_>) -> Answer {
    let tag = format!("mcp-{:?}", std::thread::current().id());
    let request = ExecRequest {
        cwd: call.text("workdir").map(str::to_owned),
        tag: Some(tag.clone()),
        kill_after: Some(call.limit()),
        ..ExecRequest::new("/bin/sh", &["-c", SHELL, "sh", call.needed("command")])
    };
    let kept = || Kept::at_most(call.sandboxes.limits.max_output);
    let (mut stdout, mut stderr, mut end) = (kept(), kept(), None);
    let _is_first = call.stop.process.set((call.sandbox().to_owned(), tag));
    let ran = call.in_agent(|client| {
        let mut stream = client.start(&request, call.limit() + SLACK)?;
        while let Some(event) = stream.next_event()? {
            let data = event.data.unwrap_or_default();
            stdout.push(&data.stdout.unwrap_or_default().0);
            stderr.push(&data.stderr.unwrap_or_default().0);
            end = event.end.or(end.take());
        }
        Ok(())
    });
    let status = match (&ran, end) {
        (Err(why), _) => why.to_string(),
        (Ok(()), Some(end)) if end.exited => format!("exit code {}", end.exit_code),
        (Ok(()), end) => guest_text(&end.unwrap_or_default().status),
    };
    let mut result = CallToolResult::success(blocks([stdout.into_text(), marked(stderr), status]));
    result.is_error = Some(ran.is_err());
    Ok(result)
}

/// Kills the process that a cancelled call has started.
pub(super) fn kill_process(sandboxes: &Sandboxes, stop: &Stop) {
    let Some((sandbox, tag)) = stop.process.get() else {
        return;
    };
    let request = SendSignalRequest {
        process: ProcessSelector {
            pid: None,
            tag: Some(tag.clone()),
        },
        signal: Signal::Kill,
    };
    let _has_ended = sandboxes.call(sandbox, ENVD_PORT, SLACK, |client| {
        client.call::<_, Empty>("process.Process/SendSignal", &request)
    });
}

fn fork(call: &Call<'_>) -> Answer {
    let count = call
        .arguments
        .get("count")
        .and_then(Value::as_u64)
        .unwrap_or(1);
    text(call.sandboxes.fork(call.sandbox(), count)?.join("\n"))
}

fn snapshot(call: &Call<'_>) -> Answer {
    text(format!(
        "snapshot: {}",
        call.sandboxes.snapshot(call.sandbox())?
    ))
}

fn network_log(call: &Call<'_>) -> Answer {
    let mut events: Vec<NetworkEvent> = call.sandboxes.get(call.sandbox(), "/network/events")?;
    events.retain(|event| {
        event
            .call
            .as_ref()
            .is_none_or(|call| call.refused.is_some())
    });
    if events.is_empty() {
        return text("nothing was refused");
    }
    let surplus = events.len().saturating_sub(MAX_EVENTS);
    let lines = events.iter().skip(surplus).map(|event| {
        let cells = call_row(event).into_iter().filter(|cell| cell != "-");
        guest_text(&cells.collect::<Vec<_>>().join("  "))
    });
    text(lines.collect::<Vec<_>>().join("\n"))
}

fn list(call: &Call<'_>) -> Answer {
    let lines = call.sandboxes.list()?.into_iter().map(|found| {
        let template = found.alias.unwrap_or(found.template_id);
        let (id, end) = (found.sandbox_id, time(Some(found.end_at)));
        format!("sandbox: {id}, template: {template}, ends if unused at: {end}\n")
    });
    match lines.collect::<String>() {
        lines if lines.is_empty() => text("no sandboxes"),
        lines => text(lines),
    }
}

fn kill(call: &Call<'_>) -> Answer {
    call.sandboxes.kill(call.sandbox())?;
    text("the sandbox has ended")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use serde_json::json;

    use super::*;
    use crate::{mcp::McpArgs, server::ServerArgs};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: McpArgs,
    }

    /// The error of a call on a server that has no sandbox, and whose API server does not exist.
    fn refused(tool: &str, arguments: Value) -> String {
        let server = ServerArgs {
            url: Some("http://127.0.0.1:1".to_owned()),
            ..ServerArgs::default()
        };
        let limits = Line::parse_from(["mcp"]).args.limits;
        let call = Call {
            sandboxes: &Sandboxes::of(server.server().unwrap(), &limits).unwrap(),
            stop: &Stop::default(),
            arguments: serde_json::from_value(arguments).unwrap(),
        };
        let tools = listed();
        let tool = tools.iter().find(|found| found.name == tool).unwrap();
        let failure = |why: Failure| CallToolResult::error(blocks([why.to_string()]));
        let mut result = run(tool, &call).unwrap_or_else(failure);
        assert_eq!(result.is_error, Some(true));
        match result.content.swap_remove(0) {
            ContentBlock::Text(text) => text.text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn hostile_arguments_are_refused_before_anything_is_sent() {
        let long = "x".repeat((1 << 20) + 1);
        for (tool, arguments, part) in [
            (
                "create",
                json!({"template": "x"}),
                "no argument \"template\"",
            ),
            ("create", json!({long.clone(): 1}), "no argument \"xxx"),
            (
                "create",
                json!({"snapshot": "base"}),
                "no snapshot \"base\"",
            ),
            ("exec", json!({"sandbox": "a"}), "command is missing"),
            (
                "exec",
                json!({"sandbox": "a", "command": null}),
                "command is missing",
            ),
            (
                "exec",
                json!({"sandbox": "a", "command": ["x"]}),
                "command is not text",
            ),
            (
                "exec",
                json!({"sandbox": "a", "command": long}),
                "the maximum is 262144",
            ),
            (
                "exec",
                json!({"sandbox": "a", "command": "a\0b"}),
                "contains NUL",
            ),
            (
                "exec",
                json!({"sandbox": "a", "command": "x", "timeout_s": 0}),
                "from 1 to 3600",
            ),
            (
                "exec",
                json!({"sandbox": "a", "command": "x", "timeout_s": -1}),
                "from 1 to 3600",
            ),
            (
                "exec",
                json!({"sandbox": "a", "command": "x", "timeout_s": 1e300}),
                "from 1 to 3600",
            ),
            (
                "exec",
                json!({"sandbox": "../a\n", "command": "x"}),
                "no sandbox \"../a\\",
            ),
            (
                "run_code",
                json!({"sandbox": "a", "code": long}),
                "the maximum is 262144",
            ),
            (
                "run_code",
                json!({"sandbox": "a", "code": "1", "language": long}),
                "language has",
            ),
            (
                "read_file",
                json!({"sandbox": "a", "path": ""}),
                "path is empty",
            ),
            (
                "write_file",
                json!({"sandbox": "a", "path": "x", "content": long}),
                "content has",
            ),
            (
                "write_file",
                json!({"sandbox": "a", "path": "x", "content": ""}),
                "no sandbox",
            ),
            (
                "list_files",
                json!({"sandbox": "a", "path": "/"}),
                "no sandbox",
            ),
            (
                "fork",
                json!({"sandbox": "a", "count": 101}),
                "from 1 to 100",
            ),
            ("fork", json!({"sandbox": "a"}), "no sandbox"),
            ("snapshot", json!({"sandbox": "a"}), "no sandbox"),
            (
                "network_log",
                json!({"sandbox": long}),
                "the maximum is 128",
            ),
            ("kill", json!({"sandbox": "a"}), "no sandbox"),
            ("list", json!({"all": true}), "no argument \"all\""),
        ] {
            let why = refused(tool, arguments);
            assert!(why.contains(part) && why.len() < 600, "{tool}: {why}");
        }
    }

    #[test]
    fn every_argument_has_a_bound() {
        let tools = listed();
        assert_eq!(tools.len(), 11);
        for tool in tools {
            assert_eq!(tool.input_schema["additionalProperties"], false);
            for (name, schema) in tool.input_schema["properties"].as_object().unwrap() {
                let bound = if schema["type"] == "string" {
                    "maxLength"
                } else {
                    "maximum"
                };
                assert!(schema[bound].is_u64(), "{}: {name}", tool.name);
            }
        }
    }
}
