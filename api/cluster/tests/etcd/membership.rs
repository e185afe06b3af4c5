//! Nodes, loads, owner records, versions and certificates.

use cluster::{
    AccountsError, Applicant, Cluster, ClusterError, EtcdConfig, IdentityFiles, Needs, NodeState,
    OwnerChange, OwnerError, OwnerState, Refusal, Replica, Route, TlsFiles, found,
};

use super::support::{
    Etcd, applicant, block_on, founded, id, identity, join, join_as, joining, load, node,
    registrar, sees, template, until,
};

pub(crate) fn cluster_nodes_find_each_other_and_a_death_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let etcd = Etcd::start("etcd", dir.path(), None);
    block_on(async {
        let first = founded(&etcd.config(), "a").await;
        let again = found(&registrar(&etcd.config()), &applicant("b")).await;
        assert!(matches!(again, Err(ClusterError::Founded)), "{again:?}");
        let a = join(etcd.config(), first.clone()).await;
        let b = join_as(etcd.config(), "b").await;
        until("a sees b, b sees a", || sees(&a, "b") && sees(&b, "a")).await;

        // Ids lead to their home from every node.
        let sandbox = b.mint([7; 19]);
        let address = "b:3000".to_owned();
        let at_b = Route::Node {
            node: id("b"),
            address,
        };
        assert_eq!((a.route(&sandbox), b.route(&sandbox)), (at_b, Route::Here));

        a.set_node_state(&id("b"), NodeState::Draining)
            .await
            .unwrap();
        until("b drains", || {
            b.view().state(&id("b")) == NodeState::Draining
        })
        .await;
        let office = registrar(&etcd.config());
        let lives = office.remove(&id("b")).await;
        assert!(
            matches!(lives, Err(ClusterError::NodeLives(_))),
            "{lives:?}"
        );
        let other = Applicant {
            identity: "other".to_owned(),
            ..applicant("b")
        };
        let taken = office.admit(&other).await;
        assert!(
            matches!(taken, Err(ClusterError::NameTaken(_))),
            "{taken:?}"
        );
        let mut stranger = first.clone();
        stranger.id = id("c");
        let refused = Cluster::join(joining(etcd.config(), stranger), node("c")).await;
        assert!(
            matches!(refused, Err(ClusterError::NotMember(_))),
            "{refused:?}"
        );
        // A second boot under the same name, while the first is alive.
        let mut twin = node("b");
        twin.incarnation = "1".parse().unwrap();
        let member = office.admit(&applicant("b")).await.unwrap();
        let refused = Cluster::join(joining(etcd.config(), member.clone()), twin).await;
        assert!(
            matches!(refused, Err(ClusterError::NameTaken(_))),
            "{refused:?}"
        );
        assert!(b.health().registered);

        // After a crash, the lease ends. After a planned stop, the node leaves at once.
        drop(b);
        until("a misses b", || !sees(&a, "b")).await;
        assert_eq!(a.route(&sandbox), Route::Away { node: id("b") });
        let b = join(etcd.config(), member).await;
        until("b returns", || sees(&a, "b")).await;
        let start = std::time::Instant::now();
        b.leave().await;
        until("b leaves", || !sees(&a, "b")).await;
        assert!(
            start.elapsed() < super::support::LEASE,
            "{:?}",
            start.elapsed()
        );
        office.remove(&id("b")).await.unwrap();
        until("b is removed", || a.view().members.len() == 1).await;
        assert_eq!(a.route(&sandbox), Route::Unknown);
    });
}

pub(crate) fn cluster_creates_write_nothing_and_loads_are_coalesced() {
    let dir = tempfile::tempdir().unwrap();
    let etcd = Etcd::start("etcd", dir.path(), None);
    block_on(async {
        let first = founded(&etcd.config(), "a").await;
        let a = join(etcd.config(), first).await;
        let replica = Replica {
            content: "c".to_owned(),
            bytes: 1,
            tagged: None,
        };
        a.add_replica(template(), replica);
        a.publish_load(load(0));
        let needs = Needs {
            template: template(),
            content: None,
            memory_mib: 256,
            platform: None,
            features: std::collections::BTreeSet::new(),
            except: std::collections::BTreeSet::new(),
        };
        until("a is a candidate", || a.place(&needs).len() == 1).await;
        until("its load is there", || {
            a.view().loads.get(&id("a")) == Some(&load(0))
        })
        .await;

        // The operations of a create, a thousand times, for longer than the interval between loads.
        let before = a.view().revision;
        for _ in 0..1000 {
            let to = a.place(&needs).remove(0);
            a.sent(&to.node);
            let sandbox = a.mint([3; 19]);
            assert_eq!(a.route(&sandbox), Route::Here);
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        // Nothing has been written without appearing in the view: a missing owner record is read at etcd's revision.
        assert_eq!(a.owner(&a.mint([4; 19])).await, Ok(None));
        assert_eq!(a.view().revision, before);

        // A hundred loads in a second cause at most two writes, and the last one arrives.
        for running in 1..=100 {
            a.publish_load(load(running));
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        until("the last load", || {
            a.view().loads.get(&id("a")) == Some(&load(100))
        })
        .await;
        let writes = a.view().revision - before;
        assert!((1..=5).contains(&writes), "{writes} writes");
    });
}

pub(crate) fn cluster_owner_records_change_by_compare_and_swap() {
    let dir = tempfile::tempdir().unwrap();
    let etcd = Etcd::start("etcd", dir.path(), None);
    block_on(async {
        let a = join(etcd.config(), founded(&etcd.config(), "a").await).await;
        let b = join_as(etcd.config(), "b").await;
        let c = join_as(etcd.config(), "c").await;
        let sandbox = a.mint([5; 19]);
        let shared = a.change_owner(&sandbox, None, OwnerChange::Share).await;
        let shared = shared.unwrap().unwrap();
        // Of two changes based on one revision, one is made.
        let start = a
            .change_owner(&sandbox, Some(&shared), OwnerChange::Start)
            .await;
        let offer = OwnerChange::Offer(id("b"));
        let late = a.change_owner(&sandbox, Some(&shared), offer.clone()).await;
        assert_eq!(late, Err(OwnerError::Changed));
        let started = start.unwrap().unwrap();
        assert_eq!(started.owner.state, OwnerState::Running);
        let running = b
            .change_owner(&sandbox, Some(&started), OwnerChange::Take)
            .await;
        assert_eq!(running, Err(OwnerError::Refused(Refusal::Running)));
        let paused = a
            .change_owner(&sandbox, Some(&started), OwnerChange::Pause)
            .await;
        let paused = paused.unwrap().unwrap();
        // The owner is alive: etcd refuses.
        let taken = c
            .change_owner(&sandbox, Some(&paused), OwnerChange::Take)
            .await;
        assert_eq!(taken, Err(OwnerError::Changed));
        let offered = a.change_owner(&sandbox, Some(&paused), offer).await;
        let offered = offered.unwrap().unwrap();
        let taken = b
            .change_owner(&sandbox, Some(&offered), OwnerChange::Take)
            .await;
        let taken = taken.unwrap().unwrap();
        assert_eq!(taken.owner.epoch, started.owner.epoch + 1);
        assert_eq!(a.owner(&sandbox).await, Ok(Some(taken.clone())));
        until(
            "c routes to b",
            || matches!(c.route(&sandbox), Route::Node { node, .. } if node == id("b")),
        )
        .await;
        // The owner is gone: etcd accepts.
        b.leave().await;
        let orphan = c
            .change_owner(&sandbox, Some(&taken), OwnerChange::Take)
            .await;
        let orphan = orphan.unwrap().unwrap();
        let ended = c
            .change_owner(&sandbox, Some(&orphan), OwnerChange::End)
            .await;
        assert_eq!(ended, Ok(None));
        assert_eq!(a.owner(&sandbox).await, Ok(None));
    });
}

pub(crate) fn cluster_an_old_etcd_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let etcd = Etcd::start("etcd-3.4", dir.path(), None);
    block_on(async {
        let start = std::time::Instant::now();
        loop {
            match found(&registrar(&etcd.config()), &applicant("a")).await {
                Err(ClusterError::OldEtcd { found }) => {
                    assert!(found.starts_with("3.4."), "{found}");
                    break;
                }
                Err(ClusterError::Unreachable { .. }) => {
                    assert!(start.elapsed() < std::time::Duration::from_secs(30));
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

pub(crate) fn cluster_etcd_with_certificates() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (Authority::new(), Authority::new());
    let certify =
        |authority: &Authority, user: &str| authority.certify(&dir.path().join(user), user);
    let [server, root] = ["server", "root"].map(|user| certify(&ours, user));
    let [for_a, for_b] = ["a", "b"].map(|name| certify(&ours, &user(name)));
    let stranger = certify(&other, "stranger");
    let etcd = Etcd::start("etcd", &dir.path().join("data"), Some(&server));
    let config = |tls: Option<TlsFiles>| EtcdConfig {
        endpoints: vec![format!("https://127.0.0.1:{}", etcd.port)],
        tls,
    };
    block_on(async {
        let root = config(Some(root));
        let a = join(config(Some(for_a)), founded(&root, "a").await).await;
        assert!(a.health().registered && a.may_act_as_owner());
        let office = registrar(&root);
        let as_b = config(Some(for_b));
        let b = join(as_b.clone(), office.admit(&applicant("b")).await.unwrap()).await;
        assert!(b.health().registered);
        b.set_node_state(&id("a"), NodeState::Cordoned)
            .await
            .unwrap();

        // A member cannot admit nodes or act as another one, even with the authority's signature.
        let forged = registrar(&as_b).admit(&applicant("c")).await;
        assert!(matches!(forged, Err(ClusterError::Unknown)), "{forged:?}");
        let c = office.admit(&applicant("c")).await.unwrap();
        let as_c = join(as_b.clone(), c).await;
        assert!(!as_c.health().registered);

        // Once removed, it has no access, even on open connections.
        b.leave().await;
        office.remove(&id("b")).await.unwrap();
        let gone = b.set_node_state(&id("a"), NodeState::Ready).await;
        assert!(
            matches!(gone, Err(ClusterError::Unreachable { .. })),
            "{gone:?}"
        );
        assert!(b.owner(&b.mint([1; 19])).await.is_err());
        assert_eq!(a.view().state(&id("a")), NodeState::Cordoned);
        // A certificate of another authority, with the right authority to verify the server.
        let authority = server.authority.clone();
        let wrong = config(Some(TlsFiles {
            authority,
            ..stranger
        }));
        let refused = found(&registrar(&wrong), &applicant("b")).await;
        assert!(
            matches!(refused, Err(ClusterError::Unreachable { .. })),
            "{refused:?}"
        );
    });
}

/// An etcd that accepts clients without certificates is refused: enabling users would lock out only the members.
pub(crate) fn cluster_an_etcd_without_client_certificates_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new();
    let [server, root] = ["server", "root"].map(|user| ours.certify(&dir.path().join(user), user));
    let etcd = Etcd::start_open("etcd", &dir.path().join("data"), &server);
    let root = EtcdConfig {
        endpoints: vec![format!("https://127.0.0.1:{}", etcd.port)],
        tls: Some(root),
    };
    block_on(async {
        let start = std::time::Instant::now();
        loop {
            match found(&registrar(&root), &applicant("a")).await {
                Err(ClusterError::Unreachable { .. }) => {
                    assert!(start.elapsed() < std::time::Duration::from_secs(30));
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                refused => {
                    let open = ClusterError::Accounts(AccountsError::Open);
                    let text = refused.unwrap_err().to_string();
                    break assert_eq!(text, open.to_string());
                }
            }
        }
    });
}

/// The user of a node in etcd.
fn user(name: &str) -> String {
    format!("{name}.{}", identity(name))
}

struct Authority {
    key: rcgen::KeyPair,
    parameters: rcgen::CertificateParams,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let pem = parameters.clone().self_signed(&key).unwrap().pem();
        Self {
            key,
            parameters,
            pem,
        }
    }

    /// Writes a certificate for 127.0.0.1, as server and as this user.
    fn certify(&self, dir: &std::path::Path, user: &str) -> TlsFiles {
        std::fs::create_dir_all(dir).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let names = vec!["127.0.0.1".to_owned()];
        let mut parameters = rcgen::CertificateParams::new(names).unwrap();
        let mut name = rcgen::DistinguishedName::new();
        name.push(rcgen::DnType::CommonName, user);
        parameters.distinguished_name = name;
        parameters.extended_key_usages = vec![
            rcgen::ExtendedKeyUsagePurpose::ServerAuth,
            rcgen::ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let issuer = rcgen::Issuer::from_params(&self.parameters, &self.key);
        let certificate = parameters.signed_by(&key, &issuer).unwrap();
        let files = TlsFiles {
            authority: dir.join("ca.pem"),
            identity: Some(IdentityFiles {
                certificate: dir.join("cert.pem"),
                key: dir.join("key.pem"),
            }),
        };
        std::fs::write(&files.authority, &self.pem).unwrap();
        std::fs::write(dir.join("cert.pem"), certificate.pem()).unwrap();
        std::fs::write(dir.join("key.pem"), key.serialize_pem()).unwrap();
        files
    }
}
