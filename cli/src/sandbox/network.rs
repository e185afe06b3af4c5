//! `cube sandbox network` and `url`.

use clap::Args;
use envd::guest_text;
use rest::{NetworkConfig, NetworkUpdate, NewSandbox, SandboxDetail};

use crate::{
    command_args::EgressArgs,
    context::Context,
    failure::Failure,
    server::{segment, unknown_sandbox},
};

#[derive(Args, Debug)]
pub(crate) struct NetworkArgs {
    /// Id of the sandbox
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    egress: EgressArgs,
}

#[derive(Args, Debug)]
pub(crate) struct UrlArgs {
    /// Id of the sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// Port on which a program in the sandbox listens
    #[arg(value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
}

/// Prints the policy. With `--egress`, replaces it first.
pub(super) fn network(context: &Context, args: &NetworkArgs) -> Result<(), Failure> {
    let path = format!("/sandboxes/{}", segment(&args.id));
    let mut server = context.server()?;
    let mut found: SandboxDetail = server.get(&path).map_err(unknown_sandbox)?;
    if !args.egress.egress.is_empty() {
        let update = update(found.network.unwrap_or_default(), &args.egress)?;
        server
            .send("PUT", &format!("{path}/network"), &update)
            .map_err(unknown_sandbox)?;
        found = server.get(&path).map_err(unknown_sandbox)?;
    }
    let network = found.network.unwrap_or_default();
    let rules = network.rules.iter().flatten().map(|(host, _)| host.clone());
    let rules: Vec<_> = rules.collect();
    let internet = match found.allow_internet_access {
        Some(true) => "allowed",
        Some(false) => "denied",
        None => "as the server is configured",
    };
    let list =
        |list: &Option<Vec<String>>| guest_text(&list.as_deref().unwrap_or_default().join(", "));
    let lines = [
        ("internet", internet.to_owned()),
        ("allowed", list(&network.allow_out)),
        ("denied", list(&network.deny_out)),
        ("DNS servers", list(&network.dns_servers)),
        ("rules for", guest_text(&rules.join(", "))),
    ];
    context.format.properties("network", &network, &lines)
}

/// The policy with other destinations. The server does not return the values of rules, so those would be lost.
fn update(now: NetworkConfig, egress: &EgressArgs) -> Result<NetworkUpdate, Failure> {
    if now.rules.is_some_and(|rules| !rules.is_empty()) || now.egress_proxy.is_some() {
        return Err(Failure::usage(
            "the sandbox has rules or a proxy, which --egress would remove",
        )
        .with_cure("send the whole policy with an SDK, or PUT /sandboxes/ID/network"));
    }
    let mut asked = NewSandbox::default();
    egress.apply(&mut asked)?;
    let network = asked.network.unwrap_or_default();
    Ok(NetworkUpdate {
        allow_out: network.allow_out,
        deny_out: network.deny_out,
        dns_servers: now.dns_servers,
        allow_internet_access: asked.allow_internet_access,
        ..NetworkUpdate::default()
    })
}

pub(super) fn url(context: &Context, args: &UrlArgs) -> Result<(), Failure> {
    let mut server = context.server()?;
    let path = format!("/sandboxes/{}", segment(&args.id));
    let found: SandboxDetail = server.get(&path).map_err(unknown_sandbox)?;
    let url = server.port_url(&found, args.port);
    let item = serde_json::json!({"sandboxID": found.sandbox_id, "port": args.port, "url": url});
    context.format.done("url", &item, &url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_policy_keeps_name_servers_and_never_drops_rules() {
        let egress = EgressArgs {
            egress: vec!["pypi.org".into()],
        };
        let now = NetworkConfig {
            dns_servers: Some(vec!["9.9.9.9".into()]),
            ..NetworkConfig::default()
        };
        let update_of = |now| update(now, &egress);
        let update = update_of(now.clone()).unwrap();
        assert_eq!(update.allow_out.unwrap(), ["pypi.org"]);
        assert_eq!(update.dns_servers, now.dns_servers);
        let ruled = NetworkConfig {
            rules: Some([("a".to_owned(), serde_json::Value::Null)].into()),
            ..now
        };
        assert!(update_of(ruled).is_err());
    }
}
