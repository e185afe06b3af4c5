//! `cube-api key`: manages the key file.

use api::{
    auth::{KeyError, KeyFile, KeyRecord, Scope, now_unix_s},
    serve::{StateError, open_state},
};
use clap::Subcommand;

use super::{Failure, config::StateDir, failure};

#[derive(Subcommand)]
pub(super) enum KeyCommand {
    /// Create a key and print it; only its hash is stored, so it cannot be shown again
    New {
        /// Name of the key, for the list of keys
        name: String,
        /// Scope of the key; repeat for more [default: all except metrics:read and nodes:admin]
        #[arg(long = "scope", value_name = "SCOPE")]
        scopes: Vec<Scope>,
        #[command(flatten)]
        state: StateDir,
    },
    /// List all keys: id, creation, state, scopes and name
    List {
        #[command(flatten)]
        state: StateDir,
    },
    /// Revoke a key by its id, or by its name if that is unique
    Revoke {
        /// Id or name, as listed by `key list`
        key: String,
        #[command(flatten)]
        state: StateDir,
    },
}

fn keys(state: StateDir) -> Result<KeyFile, Failure> {
    let path = state.find()?;
    open_state(&path).map_err(|why: StateError| failure(Failure::UnsuitableHost, &why))?;
    Ok(KeyFile::of(&path))
}

pub(super) fn run(command: KeyCommand) -> Result<(), Failure> {
    match command {
        KeyCommand::New {
            name,
            scopes,
            state,
        } => {
            let scopes = if scopes.is_empty() { usual() } else { scopes };
            let key = keys(state)?.add(&name, scopes, now_unix_s());
            println!("{}", key.map_err(|why| refused(&why))?);
        }
        KeyCommand::List { state } => {
            let keys = keys(state)?.read().map_err(|why| refused(&why))?;
            for key in &keys {
                println!("{}", line(key));
            }
        }
        KeyCommand::Revoke { key, state } => {
            let revoked = keys(state)?.revoke(&key, now_unix_s());
            let revoked = revoked.map_err(|why| refused(&why))?;
            eprintln!("revoked {}", line(&revoked));
        }
    }
    Ok(())
}

fn usual() -> Vec<Scope> {
    let all = Scope::ALL.into_iter();
    all.filter(|scope| !matches!(scope, Scope::MetricsRead | Scope::NodesAdmin))
        .collect()
}

fn line(key: &KeyRecord) -> String {
    let time = |unix_s| {
        let at = std::time::UNIX_EPOCH + std::time::Duration::from_secs(unix_s);
        humantime::format_rfc3339_seconds(at).to_string()
    };
    let state = match key.revoked_unix_s {
        Some(at) => format!("revoked {}", time(at)),
        None => "live".to_owned(),
    };
    let scopes: Vec<_> = key.scopes().map(Scope::name).collect();
    let (created, scopes) = (time(key.created_unix_s), scopes.join(","));
    format!("{}  {created}  {state}  {scopes}  {}", key.id, key.name)
}

fn refused(why: &KeyError) -> Failure {
    match why {
        KeyError::NotOne { .. } => failure(Failure::Usage, why),
        KeyError::Io { .. } | KeyError::Malformed { .. } | KeyError::Random(_) => {
            failure(Failure::UnsuitableHost, why)
        }
    }
}
