//! The users of etcd: one for each member, which may write a node's records, and `root`, whose certificate is only on
//! the host with the authority's key. etcd takes the user from the common name of the certificate and checks it for
//! each request, so a removed member is also refused on open connections. (Its open watches are not ended.)
//!
//! etcd over plain HTTP has no users.

use std::collections::BTreeSet;

use tonic::{Code, Status, transport::Channel};

use super::{Etcd, EtcdConfig, EtcdConfigError, PREFIX, prefix_end, reason, unary, wire};
use crate::Member;

const ROOT: &str = "root";
/// Prefixes that every member may write, because other nodes also change a node's sandboxes and the states set by
/// operators.
const SHARED: [&str; 2] = ["owner/", "state/"];

/// Why the users of etcd could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum AccountsError {
    #[error(transparent)]
    Config(#[from] EtcdConfigError),
    #[error("etcd accepts connections without a certificate: start it with --client-cert-auth")]
    Open,
    #[error("cannot set up the users of etcd: {0}")]
    Failed(String),
}

/// Makes the users of etcd match the members. From then on, etcd refuses all other clients.
pub(crate) async fn sync(config: &EtcdConfig, members: &[Member]) -> Result<(), AccountsError> {
    if config.tls.is_none() {
        return Ok(());
    }
    if is_open(config).await? {
        return Err(AccountsError::Open);
    }
    let etcd = Etcd::open(config)?;
    let (_, channel) = etcd.member();
    let synced = set_users(channel, members).await;
    synced.map_err(|status| AccountsError::Failed(reason(&status)))
}

/// Whether etcd accepts a client without a certificate. If so, it would still do so with users, and enabling
/// authentication would lock out the members.
async fn is_open(config: &EtcdConfig) -> Result<bool, AccountsError> {
    let mut config = config.clone();
    if let Some(tls) = &mut config.tls {
        tls.identity = None;
    }
    let (versions, _) = Etcd::open(&config)?.versions().await;
    Ok(!versions.is_empty())
}

async fn set_users(channel: &Channel, members: &[Member]) -> Result<(), Status> {
    let list = wire::Empty {};
    let found: wire::Names = unary(channel, "/etcdserverpb.Auth/UserList", list).await?;
    if !found.names.iter().any(|name| name == ROOT) {
        add_user(channel, ROOT).await?;
    }
    grant_role(channel, ROOT).await?;
    let wanted: BTreeSet<String> = members.iter().map(Member::user).collect();
    for gone in found.names.iter().filter(|name| is_gone(name, &wanted)) {
        let name = || wire::Named { name: gone.clone() };
        change(channel, "/etcdserverpb.Auth/UserDelete", name()).await?;
        existing(change(channel, "/etcdserverpb.Auth/RoleDelete", name()).await)?;
    }
    for member in members {
        let user = member.user();
        if !found.names.contains(&user) {
            add_role(channel, member).await?;
            add_user(channel, &user).await?;
        }
        grant_role(channel, &user).await?;
    }
    let status: wire::AuthStatus = unary(channel, "/etcdserverpb.Auth/AuthStatus", list).await?;
    if status.enabled {
        return Ok(());
    }
    change(channel, "/etcdserverpb.Auth/AuthEnable", list).await
}

/// Users that do not belong to members have names without a dot.
fn is_gone(name: &str, wanted: &BTreeSet<String>) -> bool {
    name.contains('.') && !wanted.contains(name)
}

async fn add_user(channel: &Channel, name: &str) -> Result<(), Status> {
    let user = wire::UserAdd {
        name: name.to_owned(),
        options: Some(wire::UserOptions { no_password: true }),
    };
    existing(change(channel, "/etcdserverpb.Auth/UserAdd", user).await)
}

/// Gives a user the role of its name. Has no effect if it already has it.
async fn grant_role(channel: &Channel, name: &str) -> Result<(), Status> {
    let grant = wire::UserGrantRole {
        user: name.to_owned(),
        role: name.to_owned(),
    };
    change(channel, "/etcdserverpb.Auth/UserGrantRole", grant).await
}

async fn add_role(channel: &Channel, member: &Member) -> Result<(), Status> {
    let role = member.user();
    let named = wire::Named { name: role.clone() };
    existing(change(channel, "/etcdserverpb.Auth/RoleAdd", named).await)?;
    for perm in permissions(member) {
        let name = role.clone();
        let perm = Some(perm);
        let grant = wire::RoleGrant { name, perm };
        change(channel, "/etcdserverpb.Auth/RoleGrantPermission", grant).await?;
    }
    Ok(())
}

/// A member may read everything and write its own records and the shared ones. Only root writes `members/` and
/// `slots/`.
fn permissions(member: &Member) -> Vec<wire::Permission> {
    let node = &member.id;
    let single = ["nodes", "load"].map(|kind| wire::Permission {
        kind: wire::PermissionKind::Write.into(),
        key: format!("{PREFIX}{kind}/{node}").into_bytes(),
        range_end: Vec::new(),
    });
    let below = ["tags", "replicas"].map(|kind| format!("{kind}/{node}/"));
    let shared = SHARED.map(str::to_owned);
    let ranges = below.iter().chain(&shared).map(|rest| {
        let key = format!("{PREFIX}{rest}").into_bytes();
        wire::Permission {
            kind: wire::PermissionKind::Write.into(),
            range_end: prefix_end(&key),
            key,
        }
    });
    let all = wire::Permission {
        kind: wire::PermissionKind::Read.into(),
        key: PREFIX.as_bytes().to_vec(),
        range_end: prefix_end(PREFIX.as_bytes()),
    };
    single.into_iter().chain(ranges).chain([all]).collect()
}

async fn change<Q: prost::Message + 'static>(
    channel: &Channel,
    path: &'static str,
    message: Q,
) -> Result<(), Status> {
    let done: Result<wire::Empty, _> = unary(channel, path, message).await;
    done.map(drop)
}

/// etcd refuses to add existing objects and to delete missing ones.
fn existing(done: Result<(), Status>) -> Result<(), Status> {
    match done {
        Err(status) if status.code() == Code::FailedPrecondition => Ok(()),
        done => done,
    }
}
