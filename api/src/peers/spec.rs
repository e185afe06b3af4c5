//! How a server becomes a node: its settings, and its record in the cluster.

use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use cluster::{
    Cluster, ClusterError, CpuKind, EtcdConfig, Incarnation, Node, TlsFiles, found,
};
use model::Platform;

use super::{
    Peers, PeerTls,
    settings::{Dir, Settings, SettingsError},
    tls::{OWN, PeerTlsError},
};

/// How long the others wait for this node before it is away.
const LEASE: Duration = Duration::from_secs(10);

/// The cluster of a server.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    pub settings: Settings,
    pub tls: PeerTls,
    dir: Dir,
}

/// Why the settings of the cluster cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterSpecError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Tls(#[from] PeerTlsError),
}

impl ClusterSpec {
    /// Reads the settings in a state directory.
    ///
    /// # Errors
    /// Returns [`ClusterSpecError`] if there are none, or they cannot be used.
    pub fn load(state: &Path) -> Result<Self, ClusterSpecError> {
        let dir = Dir::of(state);
        let settings = dir.load()?;
        let tls = PeerTls::load(&dir)?;
        Ok(Self { settings, tls, dir })
    }

    fn config(&self) -> Result<EtcdConfig, ClusterError> {
        let malformed = || ClusterError::Unreachable {
            endpoints: self.settings.etcd.join(","),
            reason: "the settings have no valid key of home tags".to_owned(),
        };
        let is_tls = self.settings.etcd.iter().any(|url| url.starts_with("https:"));
        Ok(EtcdConfig {
            endpoints: self.settings.etcd.clone(),
            tls: is_tls.then(|| TlsFiles {
                authority: self.dir.path("ca.crt"),
                certificate: self.dir.path(OWN),
                key: self.dir.path(OWN),
            }),
            lease: LEASE,
            home_key: self.settings.home_key().ok_or_else(malformed)?,
        })
    }

    /// Joins the cluster. The node that founds it creates its records first, if there are none.
    ///
    /// # Errors
    /// Returns [`ClusterError`] if etcd does not answer, or this node is no member.
    pub(crate) async fn join(&self) -> Result<Peers, ClusterError> {
        let this = self.record()?;
        let joined = match Cluster::join(self.config()?, this.clone()).await {
            Err(ClusterError::NotMember(_)) if self.settings.founds => {
                let settings = &self.settings;
                found(&self.config()?, &settings.node, &settings.identity).await?;
                tracing::info!(cluster = settings.cluster, "the cluster is founded");
                Cluster::join(self.config()?, this).await
            }
            joined => joined,
        };
        let (tls, dir) = (self.tls.clone(), self.dir.clone());
        Ok(Peers::new(joined?, tls, dir, self.settings.clone()))
    }

    fn record(&self) -> Result<Node, ClusterError> {
        let cpu = cpu_of(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let incarnation: Incarnation = boot.trim().parse().map_err(|why: cluster::NameError| {
            let reason = format!("/proc/sys/kernel/random/boot_id: {why}");
            let endpoints = self.settings.etcd.join(",");
            ClusterError::Unreachable { endpoints, reason }
        })?;
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
    fn the_kind_of_a_cpu_is_that_of_the_first_one() {
        let text = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t: 85\nflags\t: fpu vmx\n\nflags\t: fpu\n";
        let cpu = cpu_of(text);
        assert_eq!((cpu.family, cpu.model), (6, 85));
        assert_eq!(platform(&cpu), Platform::Hvm);
        assert_eq!(platform(&cpu_of("")), Platform::Ring3);
    }
}
