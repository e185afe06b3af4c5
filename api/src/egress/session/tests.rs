use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use tokio::io::{DuplexStream, Lines, duplex};

use super::*;

#[derive(Default)]
pub(in crate::egress) struct Fake {
    calls: Mutex<Vec<String>>,
    /// The sandbox of port 3 is adopted.
    is_adopted: AtomicBool,
}

impl Answers for Fake {
    fn flow(&self, peer: SocketAddr) -> Option<Flow> {
        let is_adopted = peer.port() == 3 && self.is_adopted.load(Ordering::Relaxed);
        (peer.port() == 1 || is_adopted).then(|| Flow {
            sandbox: id().to_string(),
            remote: "10.0.0.1:443".parse().unwrap(),
            names: vec!["a.test".into()],
            admitted_by_address: false,
            is_unread: false,
            has_own_way: false,
        })
    }

    fn sandbox(&self, peer: SocketAddr) -> Option<SandboxId> {
        self.flow(peer)?.sandbox.parse().ok()
    }

    fn awaits_adoption(&self, peer: SocketAddr) -> bool {
        peer.port() == 3 && !self.is_adopted.load(Ordering::Relaxed)
    }

    async fn rule(&self, _: SandboxId, host: String, ask: Ask) -> RuleOutcome {
        let headers = match ask {
            Ask::Existence => Vec::new(),
            Ask::Headers | Ask::HeadersInClear => vec![("x".to_owned(), "hunter2".to_owned())],
        };
        RuleOutcome::Headers {
            rule: host,
            headers,
            secrets: Vec::new(),
        }
    }

    async fn way(&self, _: SandboxId) -> Way {
        Way::Failed {
            reason: "none".to_owned(),
        }
    }

    fn call(&self, _: SandboxId, call: Call) {
        self.calls.lock().unwrap().extend(call.path);
    }

    fn lost(&self, calls: u64) {
        self.calls.lock().unwrap().push(format!("lost {calls}"));
    }
}

fn peer(port: u16) -> SocketAddr {
    ([198, 18, 0, 1], port).into()
}

fn id() -> SandboxId {
    SandboxId::from_random([1; 19])
}

struct Proxy {
    lines: Lines<BufReader<tokio::io::ReadHalf<DuplexStream>>>,
    writing: tokio::io::WriteHalf<DuplexStream>,
    session: tokio::task::JoinHandle<SessionError>,
    cuts: mpsc::Sender<SandboxId>,
    answers: Arc<Fake>,
}

async fn start() -> Proxy {
    let (ours, theirs) = duplex(64 << 10);
    let (cuts, mut queue) = mpsc::channel(8);
    let answers = Arc::new(Fake::default());
    let given = Arc::clone(&answers);
    let session = tokio::spawn(async move {
        let authority = Authority {
            certificate: "certificate".into(),
            key: "key".into(),
        };
        run(ours, &authority, given, &mut queue).await
    });
    let (reading, writing) = tokio::io::split(theirs);
    let mut proxy = Proxy {
        lines: BufReader::new(reading).lines(),
        writing,
        session,
        cuts,
        answers,
    };
    assert!(matches!(proxy.next().await, ToProxy::Start { .. }));
    proxy
}

impl Proxy {
    async fn next(&mut self) -> ToProxy {
        let line = self.lines.next_line().await.unwrap().unwrap();
        serde_json::from_str(&line).unwrap()
    }

    async fn send(&mut self, message: &ToServer) {
        let line = serde_json::to_string(message).unwrap() + "\n";
        self.writing.write_all(line.as_bytes()).await.unwrap();
    }

    async fn ends_after(mut self, bytes: &[u8]) -> SessionError {
        // The session may close its end before everything is written.
        let _ = self.writing.write_all(bytes).await;
        let _ = self.writing.shutdown().await;
        self.session.await.unwrap()
    }
}

#[tokio::test]
async fn questions_are_answered_by_their_ids_and_cuts_are_passed_on() {
    let mut proxy = start().await;
    for (id, port) in [(7, 1), (8, 2)] {
        let peer = ([198, 18, 0, 1], port).into();
        proxy.send(&ToServer::Flow { id, peer }).await;
        let ToProxy::Flow { id: of, flow } = proxy.next().await else {
            panic!("not the answer");
        };
        assert_eq!((of, flow.is_some()), (id, port == 1));
    }
    for ask in [Ask::Existence, Ask::Headers] {
        let rule = ToServer::Rule {
            id: 9,
            peer: peer(1),
            host: "a.test".into(),
            ask,
        };
        proxy.send(&rule).await;
        let ToProxy::Rule {
            id: 9,
            outcome: RuleOutcome::Headers { headers: got, .. },
        } = proxy.next().await
        else {
            panic!("not the answer");
        };
        assert_eq!(got.len(), usize::from(ask == Ask::Headers));
    }
    proxy
        .send(&ToServer::Way {
            id: 10,
            peer: peer(1),
        })
        .await;
    let answer = proxy.next().await;
    assert!(
        matches!(&answer, ToProxy::Way { id: 10, way: Way::Failed { reason } } if reason == "none"),
        "{answer:?}"
    );
    proxy.cuts.send(id()).await.unwrap();
    let cut = ToProxy::Cut {
        sandbox: id().to_string(),
    };
    assert_eq!(proxy.next().await, cut);
    let call = crate::egress::calls::tests::call(1);
    proxy.send(&ToServer::Call(call)).await;
    proxy.send(&ToServer::Lost { calls: 3 }).await;
    let answers = Arc::clone(&proxy.answers);
    assert!(matches!(proxy.ends_after(b"").await, SessionError::Closed));
    assert_eq!(*answers.calls.lock().unwrap(), ["/v1", "lost 3"]);
}

/// A compromised proxy could ask about any sandbox.
#[tokio::test]
async fn without_an_open_flow_there_is_neither_a_rule_nor_a_way() {
    let mut proxy = start().await;
    let rule = ToServer::Rule {
        id: 1,
        peer: peer(2),
        host: "a.test".into(),
        ask: Ask::Headers,
    };
    proxy.send(&rule).await;
    let answer = proxy.next().await;
    let ToProxy::Rule {
        outcome: RuleOutcome::Failed { reason, .. },
        ..
    } = answer
    else {
        panic!("{answer:?}");
    };
    assert_eq!(reason, NO_FLOW);
    proxy
        .send(&ToServer::Way {
            id: 2,
            peer: peer(2),
        })
        .await;
    let answer = proxy.next().await;
    assert!(
        matches!(&answer, ToProxy::Way { way: Way::Failed { reason }, .. } if reason == NO_FLOW),
        "{answer:?}"
    );
}

/// After a restart, sandboxes run before this server has adopted them.
#[tokio::test]
async fn a_flow_of_a_sandbox_that_is_being_adopted_is_answered_afterwards() {
    let mut proxy = start().await;
    let ask = |id, port| ToServer::Flow {
        id,
        peer: ([198, 18, 0, 1], port).into(),
    };
    proxy.send(&ask(1, 3)).await;
    // Other requests do not wait for it.
    proxy.send(&ask(2, 2)).await;
    let ToProxy::Flow { id: 2, flow: None } = proxy.next().await else {
        panic!("not the second answer");
    };
    let early = timeout(ADOPTION_POLL * 5, proxy.next()).await;
    assert!(early.is_err(), "answered before the adoption");
    proxy.answers.is_adopted.store(true, Ordering::Relaxed);
    let answer = proxy.next().await;
    assert!(
        matches!(
            answer,
            ToProxy::Flow {
                id: 1,
                flow: Some(_)
            }
        ),
        "{answer:?}"
    );
}

#[tokio::test]
async fn messages_that_are_too_long_or_not_of_the_protocol_end_the_session() {
    let long = vec![b'x'; MAX_MESSAGE + 1];
    let why = start().await.ends_after(&long).await;
    assert!(matches!(why, SessionError::TooLong), "{why:?}");
    let foreign =
        r#"{"type":"rule","id":1,"peer":"../x","host":"a","ask":"headers"}"#.to_owned() + "\n";
    for wrong in ["{}\n", "\n", "\u{0}\n", foreign.as_str()] {
        let why = start().await.ends_after(wrong.as_bytes()).await;
        assert!(matches!(why, SessionError::Malformed), "{wrong:?}: {why:?}");
    }
    let why = start().await.ends_after(b"{\"type\":").await;
    assert!(matches!(why, SessionError::Closed), "{why:?}");
}

#[tokio::test]
async fn a_proxy_that_does_not_read_ends_the_session() {
    let mut proxy = start().await;
    let peer = ([198, 18, 0, 1], 1).into();
    let line = serde_json::to_string(&ToServer::Flow { id: 1, peer }).unwrap() + "\n";
    let flood = async {
        while proxy.writing.write_all(line.as_bytes()).await.is_ok() {}
        // The proxy gets here only after the session has stopped reading.
    };
    let session = &mut proxy.session;
    let why = tokio::select! {
        biased;
        why = session => why.unwrap(),
        () = flood => panic!("the session ended without its reason"),
    };
    assert!(matches!(why, SessionError::Stuck), "{why:?}");
}
