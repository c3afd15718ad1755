// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"crypto/ecdh"
	"crypto/hpke"
)

// Handover is how a node gets the credentials of one Checkpoint, and no other secret. Its agent makes a
// key for that Checkpoint alone; the controller, which may read secrets, seals them for it. Whoever
// reads the object has nothing of them, nor has the node when the agent forgets the key.
type Handover struct {
	Key    []byte `json:"key"` // public
	Sealed []byte `json:"sealed,omitempty"`
}

// NewHandover returns a Handover with the key that opens it.
func NewHandover() (*Handover, hpke.PrivateKey, error) {
	key, err := hpke.DHKEM(ecdh.X25519()).GenerateKey()
	if err != nil {
		return nil, nil, err
	}
	return &Handover{Key: key.PublicKey().Bytes()}, key, nil
}

// Seal puts a secret into the Handover of the Checkpoint with the UID.
func (h *Handover) Seal(uid string, secret []byte) error {
	to, err := hpke.DHKEM(ecdh.X25519()).NewPublicKey(h.Key)
	if err != nil {
		return err
	}
	h.Sealed, err = hpke.Seal(to, hpke.HKDFSHA256(), hpke.AES256GCM(), []byte(uid), secret)
	return err
}

// Open returns the secret.
func (h *Handover) Open(uid string, key hpke.PrivateKey) ([]byte, error) {
	return hpke.Open(key, hpke.HKDFSHA256(), hpke.AES256GCM(), []byte(uid), h.Sealed)
}
