//! `cube-api cluster`: makes this host a node.

use std::{net::SocketAddr, time::Duration};

use api::{
    node::{
        self,
        settings::{Dir, EtcdLink, Settings, SettingsError},
    },
    peers::{
        authority::AuthorityError,
        join::{self, JoinError},
    },
    serve::open_state,
};
use clap::{Args, Subcommand};
use cluster::NodeId;

use super::{Failure, config::StateDir, failure};

#[derive(Subcommand)]
pub(super) enum ClusterCommand {
    /// Found a cluster with this host as its first node: creates its authority and the certificates of this node and of
    /// etcd. Nothing is sent; `cube-api serve --cluster` creates the records in etcd
    Init {
        #[command(flatten)]
        own: Own,
        /// URL of etcd, https except on loopback; repeat for more
        #[arg(long, value_name = "URL", required = true)]
        etcd: Vec<String>,
    },
    /// Print a token with which one host can join; run this on the host that founded the cluster
    Token {
        /// Time for which the token is valid
        #[arg(long, value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
        valid: Duration,
        #[command(flatten)]
        state: StateDir,
    },
    /// Join the cluster that issued a token; the server on the host that created the token must be running
    Join {
        /// The token printed by `cube-api cluster token`; `-` to read it from standard input
        token: String,
        #[command(flatten)]
        own: Own,
    },
}

#[derive(Args)]
pub(super) struct Own {
    /// Address on which the other nodes reach this one, and on which it listens
    #[arg(long, value_name = "ADDRESS:PORT")]
    address: SocketAddr,
    /// Name of this node: lower-case letters, digits and hyphens [default: the host's name]
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    #[command(flatten)]
    state: StateDir,
}

impl Own {
    fn open(self) -> Result<(Dir, NodeId), Failure> {
        if self.address.ip().is_unspecified() {
            let why = "--address: use an address that the other nodes can reach";
            return Err(Failure::Usage(why.to_owned()));
        }
        let state = self.state.find()?;
        open_state(&state).map_err(|why| failure(Failure::UnsuitableHost, &why))?;
        let name = self.node.unwrap_or_else(node::name_of_host);
        let name = name.parse::<NodeId>();
        let name = name.map_err(|why| Failure::Usage(why.to_string()))?;
        Ok((Dir::of(&state), name))
    }
}

pub(super) fn run(command: ClusterCommand) -> Result<(), Failure> {
    match command {
        ClusterCommand::Init { own, etcd } => {
            check_urls(&etcd)?;
            let address = own.address;
            let (dir, node) = own.open()?;
            let settings = join::init(&dir, node, address, etcd).map_err(|why| failed(&why))?;
            let path = |name: &str| dir.path(name).display().to_string();
            eprintln!(
                "etcd: --cert-file {} --key-file {} --trusted-ca-file {} --client-cert-auth",
                path("etcd.crt"),
                path("etcd.key"),
                path("ca.crt")
            );
            report(&settings);
        }
        ClusterCommand::Token { valid, state } => {
            let dir = Dir::of(&state.find()?);
            println!("{}", join::token(&dir, valid).map_err(|why| failed(&why))?);
        }
        ClusterCommand::Join { token, own } => {
            let token = read_token(token)?;
            let address = own.address;
            let (dir, node) = own.open()?;
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|why| failure(Failure::UnsuitableHost, &why))?;
            let joined = runtime.block_on(join::join(&dir, &token, node, address));
            report(&joined.map_err(|why| failed(&why))?);
        }
    }
    Ok(())
}

fn report(settings: &Settings) {
    eprintln!(
        "node {} of the cluster {}; start: cube-api serve --cluster",
        settings.node, settings.cluster
    );
}

/// Reads the token from standard input if asked to, because other users can read command lines.
fn read_token(token: String) -> Result<String, Failure> {
    if token != "-" {
        return Ok(token);
    }
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line);
    read.map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    Ok(line.trim().to_owned())
}

fn check_urls(urls: &[String]) -> Result<(), Failure> {
    for url in urls {
        match EtcdLink::of(url) {
            Some(EtcdLink::Tls) => {}
            Some(EtcdLink::Loopback) => eprintln!(
                "warning: {url} is plain HTTP: every program of this host can change the cluster's records"
            ),
            None => {
                return Err(Failure::Usage(format!(
                    "--etcd {url}: write https://HOST:PORT, or http://127.0.0.1:PORT"
                )));
            }
        }
    }
    Ok(())
}

fn failed(why: &JoinError) -> Failure {
    match why {
        JoinError::Malformed
        | JoinError::Spent
        | JoinError::Refused(_)
        | JoinError::Settings(SettingsError::None(_) | SettingsError::Exists(_))
        | JoinError::Authority(AuthorityError::Elsewhere) => failure(Failure::Usage, why),
        JoinError::Unreachable { .. } => failure(Failure::TargetUnreachable, why),
        _ => failure(Failure::UnsuitableHost, why),
    }
}
