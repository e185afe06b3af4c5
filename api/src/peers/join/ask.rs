//! The request that a joining host sends to the founder. It trusts only the token.

use std::{io, sync::Arc};

use axum::body::Body;
use http_body_util::{BodyExt, Limited};
use hyper::{Request, client::conn::http1};
use model::hex;
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{JoinError, Signed, Token};
use crate::peers::{authority::host_name, client::Stream, tls::PeerTlsError};

const MAX_ANSWER: usize = 64 << 10;

/// Sends a request to the founder that the token names.
pub(super) async fn ask(token: &Token, body: Vec<u8>) -> Result<Signed, JoinError> {
    let unreachable = |source| JoinError::Unreachable {
        address: token.address,
        source,
    };
    let provider = Arc::new(ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(PeerTlsError::Unusable)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned {
            authority: token.authority.clone(),
            provider,
        }))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let stream = TcpStream::connect(token.address)
        .await
        .map_err(unreachable)?;
    let name = ServerName::try_from(host_name(&token.node));
    let name = name.map_err(|_| JoinError::Malformed)?;
    let connector = TlsConnector::from(Arc::new(config));
    let stream = connector.connect(name, stream).await.map_err(unreachable)?;
    let other = |why: hyper::Error| unreachable(io::Error::other(why));
    let (mut sender, connection) = http1::handshake(Stream::new(stream)).await.map_err(other)?;
    tasks::spawn(async move { drop(connection.await) });
    let request = Request::post("/cluster/join")
        .header("host", "node.cube.internal")
        .header("content-type", "application/json")
        .body(Body::from(body))
        .map_err(|why| unreachable(io::Error::other(why)))?;
    let response = sender.send_request(request).await.map_err(other)?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER)
        .collect()
        .await;
    let bytes = body
        .map_err(|why| unreachable(io::Error::other(why)))?
        .to_bytes();
    if status.is_success() {
        serde_json::from_slice(&bytes).map_err(|why| JoinError::Refused(why.to_string()))
    } else {
        let message = serde_json::from_slice::<rest::RestError>(&bytes);
        let message = message.map_or_else(|_| format!("status {status}"), |body| body.message);
        Err(JoinError::Refused(message))
    }
}

/// Accepts a server only if its chain ends at the authority named in the token.
#[derive(Debug)]
struct Pinned {
    authority: String,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let is_pinned = |c: &&CertificateDer<'_>| hex(&Sha256::digest(c)) == self.authority;
        let authority = intermediates.iter().find(is_pinned);
        let untrusted = || rustls::Error::General("it is not the founder of the token".to_owned());
        let authority = authority.ok_or_else(untrusted)?;
        let mut roots = rustls::RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let verifier = rustls::client::WebPkiServerVerifier::builder_with_provider(
            Arc::new(roots),
            Arc::clone(&self.provider),
        );
        let verifier = verifier.build().map_err(|_| untrusted())?;
        verifier.verify_server_cert(end_entity, &[], name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not offered".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let algorithms = &self.provider.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}
