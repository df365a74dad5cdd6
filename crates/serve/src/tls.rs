//! TLS: certificates that are generated, given or read from files, and optional client certificates.
//!
//! Certificate files are polled and reloaded when their content changes. A new certificate is used for new connections;
//! open connections keep theirs. Files that cannot be used leave the last usable certificate in place.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_util::sync::CancellationToken;

/// How often certificate files are compared with what is loaded. Kubelet itself takes a minute to project a new Secret.
const RELOAD_INTERVAL: Duration = Duration::from_secs(10);

/// Where a server's certificate comes from.
#[derive(Clone)]
pub enum CertificateSource {
    /// A self-signed certificate for this DNS name, generated now. It encrypts, and proves nothing to clients.
    SelfSigned(String),
    /// PEM text: the chain, leaf first, and the leaf's private key.
    Pem {
        /// The certificate chain in PEM, leaf first.
        certificate: String,
        /// The leaf's private key in PEM.
        key: String,
    },
    /// PEM files such as the mounted Secret of cert-manager (`tls.crt`, `tls.key`). Both are reloaded when they change.
    Files {
        /// The file with the certificate chain.
        certificate: PathBuf,
        /// The file with the private key.
        key: PathBuf,
    },
}

impl fmt::Debug for CertificateSource {
    /// Leaves out private keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CertificateSource::SelfSigned(name) => f.debug_tuple("SelfSigned").field(name).finish(),
            CertificateSource::Pem { .. } => f.debug_struct("Pem").finish_non_exhaustive(),
            CertificateSource::Files { certificate, key } => {
                f.debug_struct("Files").field("certificate", certificate).field("key", key).finish()
            }
        }
    }
}

/// Whether clients are asked for a certificate, and who must have signed it.
#[derive(Clone, Debug, Default)]
pub enum ClientCertificates {
    /// Clients are not asked for one.
    #[default]
    Ignored,
    /// A client may present a certificate. One that the authorities in this PEM file did not sign ends the handshake.
    Optional(PathBuf),
    /// A client must present a certificate that the authorities in this PEM file signed.
    Required(PathBuf),
}

/// The verified certificate (DER) of the client that sent a request, as an [`axum::Extension`] of the request. Absent
/// if the client presented none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCertificate(pub CertificateDer<'static>);

/// What a server's TLS is built from.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    /// The server's own certificate.
    pub certificate: CertificateSource,
    /// The client certificates that are required.
    pub client_certificates: ClientCertificates,
    /// How often files are checked for changes.
    pub reload_interval: Duration,
}

impl TlsOptions {
    /// This certificate, no client certificates, and the default interval of 10 s between checks of files.
    pub fn new(certificate: CertificateSource) -> TlsOptions {
        TlsOptions {
            certificate,
            client_certificates: ClientCertificates::default(),
            reload_interval: RELOAD_INTERVAL,
        }
    }
}

/// Why TLS cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The certificate, key or authority file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The certificate chain is not valid PEM.
    #[error("invalid certificate in {origin}: {reason}; write the chain as PEM, leaf first")]
    InvalidCertificate {
        /// Where the certificate came from.
        origin: String,
        /// The reason it was rejected.
        reason: String,
    },
    /// The private key is not valid PEM.
    #[error("invalid private key in {origin}: {reason}; write it as PEM")]
    InvalidKey {
        /// Where the key came from.
        origin: String,
        /// The reason it was rejected.
        reason: String,
    },
    /// Certificate and key do not belong together, or are of an unsupported kind.
    #[error("cannot use the certificate and key in {origin}: {reason}")]
    UnusablePair {
        /// Where both came from.
        origin: String,
        /// The reason they were rejected.
        reason: String,
    },
    /// The authorities for client certificates cannot be used.
    #[error("invalid client certificate authorities in {}: {reason}", path.display())]
    InvalidAuthorities {
        /// The file with the client certificate authorities.
        path: PathBuf,
        /// The reason it was rejected.
        reason: String,
    },
    /// A self-signed certificate cannot be generated.
    #[error("cannot generate a certificate for {name}: {reason}")]
    NotGenerated {
        /// The DNS name that the certificate was to be for.
        name: String,
        /// Why the certificate could not be generated.
        reason: String,
    },
}

/// A server's certificate and its requirements of clients, which change with the files they come from.
///
/// ```
/// use partage_serve::{CertificateSource, TlsIdentity, TlsOptions};
///
/// let options = TlsOptions::new(CertificateSource::SelfSigned("node-1.example".into()));
/// let identity = TlsIdentity::load(options)?;
/// # Ok::<(), partage_serve::TlsError>(())
/// ```
pub struct TlsIdentity {
    options: TlsOptions,
    provider: Arc<CryptoProvider>,
    loaded: Mutex<LoadedCertificate>,
}

struct LoadedCertificate {
    material: TlsMaterial,
    config: Arc<ServerConfig>,
}

/// The bytes that a configuration was built from.
#[derive(PartialEq, Eq)]
struct TlsMaterial {
    certificate: Vec<u8>,
    key: Vec<u8>,
    authorities: Option<Vec<u8>>,
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsIdentity").field("options", &self.options).finish_non_exhaustive()
    }
}

impl TlsIdentity {
    /// Generates or reads the certificate.
    pub fn load(mut options: TlsOptions) -> Result<TlsIdentity, TlsError> {
        if let CertificateSource::SelfSigned(name) = &options.certificate {
            options.certificate = self_signed(name)?;
        }
        // Named explicitly, so that no default of the whole process is needed or set.
        let provider = Arc::new(ring::default_provider());
        let material = read_material(&options)?;
        let config = build(&options, &material, &provider)?;
        Ok(TlsIdentity { options, provider, loaded: Mutex::new(LoadedCertificate { material, config }) })
    }

    /// Reads the files again and returns whether they have changed. On an error the last usable certificate stays.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let material = read_material(&self.options)?;
        if self.loaded().material == material {
            return Ok(false);
        }
        let config = build(&self.options, &material, &self.provider)?;
        *self.loaded() = LoadedCertificate { material, config };
        Ok(true)
    }

    /// Returns an acceptor with the certificate that is loaded now.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.loaded().config))
    }

    /// Polls the files until `stop`.
    pub(crate) async fn reload_on_change(self: Arc<Self>, stop: CancellationToken) {
        if !self.has_files() {
            return;
        }
        let mut last_error = String::new();
        while stop.run_until_cancelled(tokio::time::sleep(self.options.reload_interval)).await.is_some() {
            let identity = Arc::clone(&self);
            match tokio::task::spawn_blocking(move || identity.reload()).await {
                Ok(Ok(changed)) => {
                    last_error.clear();
                    if changed {
                        tracing::info!("TLS certificate reloaded");
                    }
                }
                Ok(Err(error)) => {
                    let error = error.to_string();
                    if error != last_error {
                        tracing::warn!(
                            error,
                            "cannot reload the TLS certificate: the previous one stays in use"
                        );
                        last_error = error;
                    }
                }
                Err(error) => tracing::warn!(%error, "reloading the TLS certificate failed"),
            }
        }
    }

    fn has_files(&self) -> bool {
        let options = &self.options;
        matches!(options.certificate, CertificateSource::Files { .. })
            || !matches!(options.client_certificates, ClientCertificates::Ignored)
    }

    fn loaded(&self) -> MutexGuard<'_, LoadedCertificate> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn self_signed(name: &str) -> Result<CertificateSource, TlsError> {
    let generated = rcgen::generate_simple_self_signed([name.to_string()])
        .map_err(|error| TlsError::NotGenerated { name: name.into(), reason: error.to_string() })?;
    let certificate = generated.cert.pem();
    Ok(CertificateSource::Pem { certificate, key: generated.signing_key.serialize_pem() })
}

fn read_material(options: &TlsOptions) -> Result<TlsMaterial, TlsError> {
    let (certificate, key) = match &options.certificate {
        CertificateSource::Pem { certificate, key } => (certificate.clone().into(), key.clone().into()),
        CertificateSource::Files { certificate, key } => (read(certificate)?, read(key)?),
        // `load` replaces it by PEM text, so that a reload does not generate another one.
        CertificateSource::SelfSigned(_) => (Vec::new(), Vec::new()),
    };
    let authorities = match &options.client_certificates {
        ClientCertificates::Ignored => None,
        ClientCertificates::Optional(path) | ClientCertificates::Required(path) => Some(read(path)?),
    };
    Ok(TlsMaterial { certificate, key, authorities })
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Unreadable { path: path.into(), source })
}

fn build(
    options: &TlsOptions,
    material: &TlsMaterial,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<ServerConfig>, TlsError> {
    let (certificate_origin, key_origin) = match &options.certificate {
        CertificateSource::Files { certificate, key } => {
            (certificate.display().to_string(), key.display().to_string())
        }
        _ => ("the PEM text".to_string(), "the PEM text".to_string()),
    };
    let unusable = |reason: String| TlsError::UnusablePair { origin: certificate_origin.clone(), reason };
    let invalid = |reason| TlsError::InvalidCertificate { origin: certificate_origin.clone(), reason };
    let chain = certificates(&material.certificate).map_err(invalid)?;
    let key = PrivateKeyDer::from_pem_slice(&material.key)
        .map_err(|error| TlsError::InvalidKey { origin: key_origin, reason: error.to_string() })?;
    let builder = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(error.to_string()))?;
    let builder = match &options.client_certificates {
        ClientCertificates::Ignored => builder.with_no_client_auth(),
        ClientCertificates::Optional(path) | ClientCertificates::Required(path) => {
            let invalid = |reason| TlsError::InvalidAuthorities { path: path.clone(), reason };
            let mut roots = RootCertStore::empty();
            for authority in
                certificates(material.authorities.as_deref().unwrap_or_default()).map_err(invalid)?
            {
                roots.add(authority).map_err(|error| invalid(error.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
            let verifier = match &options.client_certificates {
                ClientCertificates::Optional(_) => verifier.allow_unauthenticated(),
                _ => verifier,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|error| invalid(error.to_string()))?)
        }
    };
    let config = builder.with_single_cert(chain, key).map_err(|error| unusable(error.to_string()))?;
    Ok(Arc::new(config))
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain =
        CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
    if chain.is_empty() { Err("it contains no certificate".into()) } else { Ok(chain) }
}
