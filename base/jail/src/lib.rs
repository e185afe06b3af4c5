//! The jail of a process that reads untrusted input. A process that starts confined has no right that it does not need,
//! and none of the layers can be undone.
//!
//! ```text
//! limits         no core dump, and the limits of the program
//! user           a user and a group that own nothing, no supplementary groups
//! capabilities   none, and none to regain
//! dumpable       off: processes of the same user cannot trace it or read its files in /proc
//! landlock       nothing by path; no abstract socket and no signal outside this process
//! seccomp        the system calls that the program names; its filter decides what happens at any other
//! ```
//! Open descriptors and memory remain, so a program opens everything that it needs before.

pub mod filter;

use caps::{CapSet, Capability, CapsHashSet, errors::CapsError};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetError, Scope,
};
use nix::{
    sys::{
        prctl,
        resource::{Resource, setrlimit},
    },
    unistd::{Gid, Uid, setgroups, setresgid, setresuid},
};
use seccompiler::BpfProgram;

pub use landlock::RulesetStatus;

/// Reasons why the process could not be confined. It must then exit.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error("cannot set the process's limits")]
    Limits(#[source] nix::Error),
    #[error("user and group 0 would keep the rights of root: give others")]
    Root,
    /// The process is not root, or the id is not usable.
    #[error("cannot become user {user}")]
    User {
        user: u32,
        #[source]
        source: nix::Error,
    },
    #[error("cannot drop capabilities")]
    Capabilities(#[source] CapsError),
    #[error("cannot make the process undumpable")]
    Dumpable(#[source] nix::Error),
    #[error("cannot apply the Landlock ruleset")]
    Landlock(#[source] RulesetError),
    #[error("cannot install the seccomp filter (is the kernel built with CONFIG_SECCOMP_FILTER?)")]
    Filter(#[source] filter::Error),
}

/// The user and group that the process changes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub user: u32,
    pub group: u32,
}

/// The TCP sockets that Landlock permits. The seccomp filter may forbid more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    Nothing,
    /// Connections to servers, without listening sockets.
    Connections,
}

/// The layers, in the order in which they are applied: most need a capability or system call that a later one removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    Limits,
    User,
    Capabilities,
    Dumpable,
    Landlock,
    Seccomp,
}

impl Layer {
    const ALL: [Self; 6] = [
        Self::Limits,
        Self::User,
        Self::Capabilities,
        Self::Dumpable,
        Self::Landlock,
        Self::Seccomp,
    ];
}

/// The confinement of one program.
#[derive(Debug)]
pub struct Jail<'a> {
    /// Soft and hard limits besides the one on core dumps.
    pub limits: &'a [(Resource, u64, u64)],
    /// `None` if the process does not run as root.
    pub identity: Option<Identity>,
    pub network: Network,
    /// Installed in this order. The strictest action of all filters decides.
    pub filters: &'a [BpfProgram],
}

impl Jail<'_> {
    /// Confines this process, which must have one thread. Threads that start later inherit the confinement. Returns how
    /// much of the Landlock ruleset the kernel enforces: an older kernel enforces a part or nothing. This is not an error,
    /// because the user, the dumpable flag and the seccomp filter enforce the same restrictions.
    ///
    /// # Errors
    /// Returns [`JailError`] for the layer that failed.
    pub fn enter(&self) -> Result<RulesetStatus, JailError> {
        keep_only_what_changes_users()?;
        self.enter_layers(|_| true)
    }

    /// Applies the wanted layers: [`enter`](Self::enter) for a process that has already called
    /// [`keep_only_what_changes_users`], or whose confinement a prover weakens.
    ///
    /// # Errors
    /// Returns [`JailError`] for the layer that failed.
    pub fn enter_layers(&self, wanted: impl Fn(Layer) -> bool) -> Result<RulesetStatus, JailError> {
        let mut landlock = RulesetStatus::FullyEnforced;
        for layer in Layer::ALL.into_iter().filter(|layer| wanted(*layer)) {
            match layer {
                Layer::Limits => limit(self.limits)?,
                Layer::User => self.identity.map_or(Ok(()), change_user)?,
                Layer::Capabilities => drop_capabilities()?,
                Layer::Dumpable => prctl::set_dumpable(false).map_err(JailError::Dumpable)?,
                Layer::Landlock => landlock = restrict(self.network)?,
                Layer::Seccomp => self.filters.iter().try_for_each(|program| {
                    seccompiler::apply_filter(program).map_err(JailError::Filter)
                })?,
            }
        }
        Ok(landlock)
    }
}

/// Drops all effective capabilities except those that the layers need, and, with CAP_SETPCAP, empties the bounding set.
///
/// # Errors
/// Returns [`JailError::Capabilities`].
pub fn keep_only_what_changes_users() -> Result<(), JailError> {
    let needed = [
        Capability::CAP_SETUID,
        Capability::CAP_SETGID,
        Capability::CAP_SETPCAP,
        // A limit of the program may be above the inherited one.
        Capability::CAP_SYS_RESOURCE,
    ];
    let held = caps::read(None, CapSet::Permitted).map_err(JailError::Capabilities)?;
    let keep: CapsHashSet = needed.into_iter().filter(|c| held.contains(c)).collect();
    if keep.contains(&Capability::CAP_SETPCAP) {
        // With an empty bounding set no capability can be regained, not even by a program with file capabilities.
        caps::clear(None, CapSet::Bounding).map_err(JailError::Capabilities)?;
    }
    caps::set(None, CapSet::Effective, &keep).map_err(JailError::Capabilities)
}

fn limit(limits: &[(Resource, u64, u64)]) -> Result<(), JailError> {
    let no_core = (Resource::RLIMIT_CORE, 0, 0);
    let mut limits = limits.iter().copied().chain([no_core]);
    limits
        .try_for_each(|(limit, soft, hard)| setrlimit(limit, soft, hard))
        .map_err(JailError::Limits)
}

fn change_user(Identity { user, group }: Identity) -> Result<(), JailError> {
    if user == 0 || group == 0 {
        return Err(JailError::Root);
    }
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(group));
    setgroups(&[])
        .and_then(|()| setresgid(gid, gid, gid))
        .and_then(|()| setresuid(uid, uid, uid))
        .map_err(|source| JailError::User { user, source })
}

fn drop_capabilities() -> Result<(), JailError> {
    for set in [
        CapSet::Ambient,
        CapSet::Inheritable,
        CapSet::Effective,
        CapSet::Permitted,
    ] {
        caps::clear(None, set).map_err(JailError::Capabilities)?;
    }
    Ok(())
}

/// Applies a ruleset without a single exception, as far as the kernel has Landlock.
fn restrict(network: Network) -> Result<RulesetStatus, JailError> {
    let abi = ABI::V6;
    let forbidden: BitFlags<AccessNet> = match network {
        Network::Nothing => AccessNet::from_all(abi),
        Network::Connections => AccessNet::BindTcp.into(),
    };
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))
        .and_then(|rules| rules.handle_access(forbidden))
        .and_then(|rules| rules.scope(Scope::from_all(abi)))
        .and_then(|rules| rules.create())
        .and_then(|rules| rules.restrict_self())
        .map_err(JailError::Landlock)?;
    Ok(status.ruleset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_no_identity_of_a_confined_process() {
        for (user, group) in [(0, 0), (0, 7), (7, 0)] {
            let refused = change_user(Identity { user, group });
            assert!(matches!(refused, Err(JailError::Root)));
        }
    }
}
