//! `cube sandbox calls`: a sandbox's outbound calls through the egress proxy, and refusals.

use clap::Args;
use rest::NetworkEvent;

use super::observe::follow;
use crate::{
    context::Context,
    failure::Failure,
    output::{Format, print, time},
    server::{segment, unknown_sandbox},
};

#[derive(Args, Debug)]
pub(crate) struct CallsArgs {
    /// Id of the sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// Omit refused packets, which did not reach the proxy
    #[arg(long)]
    no_packets: bool,
    /// Continue to print new ones until the sandbox ends
    #[arg(short, long)]
    follow: bool,
}

const COLUMNS: [&str; 9] = [
    "TIME", "RESULT", "HOST", "METHOD", "PATH", "OUT", "IN", "RULE", "SECRETS",
];

pub(super) fn calls(context: &Context, args: &CallsArgs) -> Result<(), Failure> {
    let path = format!("/sandboxes/{}/network/events", segment(&args.id));
    let mut server = context.server()?;
    let mut list = || -> Result<Vec<_>, Failure> {
        let mut found: Vec<NetworkEvent> = server.get(&path)?;
        found.retain(|event| event.call.is_some() || !args.no_packets);
        Ok(found)
    };
    let found = list().map_err(unknown_sandbox)?;
    if !args.follow {
        return context.format.list("call", &found, &COLUMNS, row);
    }
    show(context.format, &found)?;
    follow(found, list, |new| show(context.format, new))
}

fn show(format: Format, new: &[NetworkEvent]) -> Result<(), Failure> {
    match format {
        Format::Json => format.list("call", new, &[], |_| Vec::new()),
        Format::Human => {
            let lines: String = new
                .iter()
                .map(|event| row(event).join("  ") + "\n")
                .collect();
            print(&lines)
        }
    }
}

pub(crate) fn row(event: &NetworkEvent) -> Vec<String> {
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let host = event
        .name
        .clone()
        .unwrap_or_else(|| event.destination.clone());
    let at = time(Some(event.timestamp));
    let Some(call) = &event.call else {
        let result = format!("refused: {}", event.reason);
        let packets = format!("{} packets", event.count);
        let mut cells = vec![at, result, host, "-".to_owned(), "-".to_owned(), packets];
        cells.extend(["-", "-", "-"].map(str::to_owned));
        return cells;
    };
    let result = match (&call.refused, call.status) {
        (Some(why), _) => format!("refused: {why}"),
        (None, Some(status)) => status.to_string(),
        (None, None) => "passed".to_owned(),
    };
    let secrets = match call.secrets.as_slice() {
        [] => "-".to_owned(),
        names => names.join(","),
    };
    vec![
        at,
        result,
        host,
        text(&call.method),
        text(&call.path),
        call.bytes_out.to_string(),
        call.bytes_in.to_string(),
        text(&call.rule),
        secrets,
    ]
}

#[cfg(test)]
mod tests {
    use rest::NetworkCall;

    use super::*;

    #[test]
    fn calls_and_refused_packets_have_the_same_columns() {
        let packet = NetworkEvent {
            timestamp: envd::Timestamp::from_unix_ns(0),
            direction: "out".into(),
            protocol: "tcp".into(),
            source: "169.254.0.21:1".into(),
            destination: "10.0.0.1:443".into(),
            reason: "policy".into(),
            name: None,
            count: 3,
            call: None,
        };
        let call = NetworkEvent {
            name: Some("a.test".into()),
            call: Some(NetworkCall {
                status: Some(200),
                secrets: vec!["a".into(), "b".into()],
                ..NetworkCall::default()
            }),
            ..packet.clone()
        };
        for event in [&packet, &call] {
            assert_eq!(row(event).len(), COLUMNS.len());
        }
        assert_eq!(row(&packet)[1..3], ["refused: policy", "10.0.0.1:443"]);
        assert_eq!(row(&call)[1..3], ["200", "a.test"]);
        assert_eq!(row(&call)[8], "a,b");
    }
}
