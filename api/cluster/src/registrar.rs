//! Changes of the members: founding, admission, removal. Each is planned on the current keys and written only if no other
//! change has interfered.

use crate::{
    Applicant, ClusterError, Member, NodeId, Registrar,
    admission::{Admission, Denied, Keys},
    etcd::{self, Etcd, check_version},
    store::{Answer, Request, Txn},
};

/// Two concurrent admissions must not delete each other's users.
static SECURING: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
/// Maximum number of attempts at a change with which others may interfere.
const ATTEMPTS: usize = 8;

/// Founds a cluster in an etcd without one: writes its format and the first member. For `cube cluster init`.
pub async fn found(registrar: &Registrar, applicant: &Applicant) -> Result<Member, ClusterError> {
    let store = Etcd::open(&registrar.etcd)?;
    check_versions(&store).await?;
    let plan = |keys: &Keys| {
        let (txn, member) = keys.found(applicant, &registrar.signer)?;
        Ok(Plan::Do(txn, member))
    };
    let member = transact(&store, &applicant.id, plan).await?;
    registrar.secure().await?;
    Ok(member)
}

impl Registrar {
    /// Admits a node: reserves its name and a slot, and creates its etcd user. A host that is already a member gets its
    /// existing record.
    pub async fn admit(&self, applicant: &Applicant) -> Result<Member, ClusterError> {
        let store = Etcd::open(&self.etcd)?;
        let plan = |keys: &Keys| {
            Ok(match keys.admit(applicant, &self.signer)? {
                Admission::Make(txn, member) => Plan::Do(txn, member),
                Admission::Is(member) => Plan::Done(member),
            })
        };
        let member = transact(&store, &applicant.id, plan).await?;
        self.secure().await?;
        Ok(member)
    }

    /// Removes a member whose node is down, and its etcd user. Its sandboxes are lost from then on.
    pub async fn remove(&self, node: &NodeId) -> Result<(), ClusterError> {
        let store = Etcd::open(&self.etcd)?;
        let plan = |keys: &Keys| Ok(Plan::Do(keys.remove(node)?, ()));
        transact(&store, node, plan).await?;
        self.secure().await
    }

    /// Makes the users of etcd match the members. Repairs the effects of an interrupted change.
    pub async fn secure(&self) -> Result<(), ClusterError> {
        let _turn = SECURING.lock().await;
        let store = Etcd::open(&self.etcd)?;
        let Ok(Answer::List { entries, .. }) = store.ask(Request::List).await else {
            return Err(ClusterError::Unreachable {
                endpoints: store.addresses(),
                reason: "cannot list the keys".to_owned(),
            });
        };
        let members = Keys::read(&entries).signed(&self.signer);
        Ok(etcd::sync(&self.etcd, &members).await?)
    }
}

/// All members that respond must be new enough, and at least one must respond.
pub(crate) async fn check_versions(store: &Etcd) -> Result<(), ClusterError> {
    let (versions, failure) = store.versions().await;
    if let Some(found) = versions.iter().find(|version| !check_version(version)) {
        let found = found.clone();
        return Err(ClusterError::OldEtcd { found });
    }
    match failure {
        Some(reason) if versions.is_empty() => Err(ClusterError::Unreachable {
            endpoints: store.addresses(),
            reason,
        }),
        _ => Ok(()),
    }
}

/// The decision based on the current keys.
pub(crate) enum Plan<T> {
    Do(Txn, T),
    Done(T),
}

/// Lists, plans and writes, until no other change interferes.
pub(crate) async fn transact<T>(
    store: &Etcd,
    node: &NodeId,
    plan: impl Fn(&Keys) -> Result<Plan<T>, Denied>,
) -> Result<T, ClusterError> {
    for _ in 0..ATTEMPTS {
        let Ok(Answer::List { entries, .. }) = store.ask(Request::List).await else {
            return Err(ClusterError::Unreachable {
                endpoints: store.addresses(),
                reason: "cannot list the keys".to_owned(),
            });
        };
        let (txn, outcome) = match plan(&Keys::read(&entries)).map_err(|d| denied(d, node))? {
            Plan::Do(txn, outcome) => (txn, outcome),
            Plan::Done(outcome) => return Ok(outcome),
        };
        match store.ask(Request::Txn(txn)).await {
            Ok(Answer::Txn {
                succeeded: true, ..
            }) => return Ok(outcome),
            Ok(_) => {}
            Err(_) => return Err(ClusterError::Unknown),
        }
    }
    Err(ClusterError::Unknown)
}

fn denied(denied: Denied, node: &NodeId) -> ClusterError {
    match denied {
        Denied::NoCluster { format: None } => ClusterError::NoCluster,
        Denied::NoCluster {
            format: Some(format),
        } => ClusterError::OtherFormat(format),
        Denied::Founded => ClusterError::Founded,
        Denied::NameTaken => ClusterError::NameTaken(node.clone()),
        Denied::NotMember => ClusterError::NotMember(node.clone()),
        Denied::NodeLives => ClusterError::NodeLives(node.clone()),
        Denied::Full(members) => ClusterError::Full(members),
    }
}
