//! Turns a server into a node: reads its settings and joins the cluster.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use cluster::{
    AccountsError, Applicant, Cluster, ClusterError, CpuKind, EtcdConfig, HomeSlot, IdentityFiles,
    Incarnation, JoinConfig, Member, Node, Registrar, TlsFiles, found,
};
use model::Platform;

use crate::node::settings::{Dir, ETCD_ROOT, EtcdLink, Settings, SettingsError};

use super::{
    PeerTls, Peers,
    authority::{Authority, AuthorityError},
    join::JoinError,
    tls::{OWN, PeerTlsError, own_key, verifier},
    transfer::TransferLimits,
};

/// Time without contact after which the other nodes consider this node unreachable.
const LEASE: Duration = Duration::from_secs(10);

/// How long the founder waits for etcd, and the interval between attempts.
const FOUND: Duration = Duration::from_secs(60);
const AGAIN: Duration = Duration::from_secs(1);

/// A server's cluster membership.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    pub settings: Settings,
    pub tls: PeerTls,
    /// Limits of file transfers from and to other nodes.
    pub transfers: TransferLimits,
    dir: Dir,
}

/// Why the settings of the cluster cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterSpecError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Tls(#[from] PeerTlsError),
    #[error(
        "the settings of the cluster name etcd at {0}: only https, and http on a loopback address, are accepted"
    )]
    Plain(String),
}

impl ClusterSpec {
    /// Reads the settings in a state directory.
    ///
    /// # Errors
    /// Returns [`ClusterSpecError`] if there are none, or they cannot be used.
    pub fn load(state: &Path, transfers: TransferLimits) -> Result<Self, ClusterSpecError> {
        let dir = Dir::of(state);
        let settings = dir.load()?;
        check_links(&settings)?;
        let tls = PeerTls::load(&dir)?;
        Ok(Self {
            settings,
            tls,
            transfers,
            dir,
        })
    }

    /// Joins the cluster. The first node founds it first.
    ///
    /// # Errors
    /// Returns [`JoinError`] if this node is not a member, or if etcd does not respond at the first start of the first
    /// node.
    pub(crate) async fn join(&self) -> Result<Peers, JoinError> {
        let this = self.record()?;
        let mut settings = self.settings.clone();
        // Another process may have founded it since this one read the settings.
        if settings.member.is_none() {
            settings = self.dir.load()?;
        }
        let member = match &settings.member {
            Some(member) => member.clone(),
            None => {
                let member = self.found(&settings).await?;
                settings.member = Some(member.clone());
                self.dir.store(&settings)?;
                tracing::info!(cluster = settings.cluster, "founded the cluster");
                member
            }
        };
        self.secure().await?;
        let home_key = settings.home_key().ok_or(JoinError::Malformed)?;
        let config = JoinConfig {
            etcd: etcd_config(&self.dir, &settings, OWN),
            lease: LEASE,
            home_key,
            member,
            verifier: verifier(&self.dir, &settings.cluster)?,
        };
        let cluster = Cluster::join(config, this).await?;
        let (tls, dir) = (self.tls.clone(), self.dir.clone());
        Ok(Peers::new(cluster, tls, dir, settings, self.transfers))
    }

    /// Founds the cluster. If this node founded it earlier but could not store the record, it has the first slot.
    async fn found(&self, settings: &Settings) -> Result<Member, JoinError> {
        let registrar = registrar(&self.dir, settings)?;
        let applicant = Applicant {
            id: settings.node.clone(),
            identity: settings.identity.clone(),
            key: own_key(&self.dir)?,
        };
        let deadline = Instant::now() + FOUND;
        let made = loop {
            match found(&registrar, &applicant).await {
                // etcd may also still be starting.
                Err(why @ ClusterError::Unreachable { .. }) if Instant::now() < deadline => {
                    tracing::warn!("cannot found the cluster: {}: retrying", model::chain(&why));
                    tokio::time::sleep(AGAIN).await;
                }
                made => break made,
            }
        };
        match (made, HomeSlot::new(0)) {
            (Err(ClusterError::Founded), Some(slot)) => {
                Ok(registrar.signer.member(&applicant, slot))
            }
            (made, _) => Ok(made?),
        }
    }

    /// On the node that has the authority's key: repairs etcd users after an interrupted change.
    async fn secure(&self) -> Result<(), JoinError> {
        let registrar = match registrar(&self.dir, &self.settings) {
            Err(AuthorityError::Elsewhere) => return Ok(()),
            found => found?,
        };
        match registrar.secure().await {
            Err(why @ ClusterError::Accounts(AccountsError::Open)) => Err(why.into()),
            // The server still serves its own sandboxes.
            Err(why) => {
                tracing::warn!("cannot check the users of etcd: {}", model::chain(&why));
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn record(&self) -> Result<Node, JoinError> {
        let cpu = cpu_of(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let incarnation: Incarnation = boot.trim().parse().map_err(JoinError::Boot)?;
        Ok(Node {
            id: self.settings.node.clone(),
            identity: self.settings.identity.clone(),
            address: self.settings.address.to_string(),
            incarnation,
            platform: platform(&cpu),
            cpu,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }
}

fn check_links(settings: &Settings) -> Result<(), ClusterSpecError> {
    for url in &settings.etcd {
        match EtcdLink::of(url) {
            Some(EtcdLink::Tls) => {}
            Some(EtcdLink::Loopback) => tracing::warn!(
                etcd = url,
                "the connection to etcd uses plain HTTP: every program on this host can change its records; found the cluster with an https URL"
            ),
            None => return Err(ClusterSpecError::Plain(url.clone())),
        }
    }
    Ok(())
}

/// The connection to etcd, with the certificate and key in the file `identity`.
fn etcd_config(dir: &Dir, settings: &Settings, identity: &str) -> EtcdConfig {
    let is_tls = settings.etcd.iter().any(|url| url.starts_with("https:"));
    EtcdConfig {
        endpoints: settings.etcd.clone(),
        tls: is_tls.then(|| TlsFiles {
            authority: dir.path("ca.crt"),
            identity: Some(IdentityFiles {
                certificate: dir.path(identity),
                key: dir.path(identity),
            }),
        }),
    }
}

/// The registrar, which admits and removes members.
///
/// # Errors
/// Returns [`AuthorityError::Elsewhere`] if the authority's key is not on this node.
pub(crate) fn registrar(dir: &Dir, settings: &Settings) -> Result<Registrar, AuthorityError> {
    let authority = Authority::load(dir, &settings.cluster)?;
    Ok(Registrar {
        signer: authority.signer()?,
        etcd: etcd_config(dir, settings, ETCD_ROOT),
    })
}

/// Guests run in ring 0 if the CPU has VMX or SVM.
fn platform(cpu: &CpuKind) -> Platform {
    if cpu.features.contains("vmx") || cpu.features.contains("svm") {
        Platform::Hvm
    } else {
        Platform::Ring3
    }
}

fn cpu_of(cpuinfo: &str) -> CpuKind {
    let first = cpuinfo.split("\n\n").next().unwrap_or_default();
    let value = |name: &str| {
        let found = first.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        });
        found.unwrap_or_default()
    };
    let flags = value("flags");
    let features: BTreeSet<_> = flags.split_whitespace().map(str::to_owned).collect();
    CpuKind {
        vendor: value("vendor_id"),
        family: value("cpu family").parse().unwrap_or(0),
        model: value("model").parse().unwrap_or(0),
        name: value("model name"),
        features,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_with_etcd_over_a_network_without_tls_are_refused() {
        let state = tempfile::tempdir().unwrap();
        let dir = Dir::of(state.path());
        let address = "127.0.0.1:9".parse().unwrap();
        let node: cluster::NodeId = "a".parse().unwrap();
        let limits = TransferLimits {
            rate: model::Bytes(1),
            disk_reserve: model::Bytes(0),
        };
        let etcd = vec!["http://127.0.0.1:2379".to_owned()];
        let mut settings = crate::peers::join::init(&dir, node, address, etcd).unwrap();
        assert!(ClusterSpec::load(state.path(), limits).is_ok());
        settings.etcd.push("http://10.0.0.1:2379".to_owned());
        dir.store(&settings).unwrap();
        let refused = ClusterSpec::load(state.path(), limits);
        assert!(matches!(refused, Err(ClusterSpecError::Plain(_))));
    }

    #[test]
    fn the_kind_of_a_cpu_is_that_of_the_first_one() {
        let text = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t: 85\nflags\t: fpu vmx\n\nflags\t: fpu\n";
        let cpu = cpu_of(text);
        assert_eq!((cpu.family, cpu.model), (6, 85));
        assert_eq!(platform(&cpu), Platform::Hvm);
        assert_eq!(platform(&cpu_of("")), Platform::Ring3);
    }
}
