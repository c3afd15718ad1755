// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oplogcmd

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// What OTLP's JSON has of a trace (opentelemetry.io/docs/specs/otlp, JSON Protobuf encoding):
// identifiers are hexadecimal, 64-bit numbers are strings.
type (
	otlpTraces struct {
		ResourceSpans []otlpResource `json:"resourceSpans"`
	}
	otlpResource struct {
		Resource struct {
			Attributes []otlpAttribute `json:"attributes"`
		} `json:"resource"`
		ScopeSpans []otlpScope `json:"scopeSpans"`
	}
	otlpScope struct {
		Scope struct {
			Name string `json:"name"`
		} `json:"scope"`
		Spans []otlpSpan `json:"spans"`
	}
	otlpSpan struct {
		Trace      string          `json:"traceId"`
		ID         string          `json:"spanId"`
		Parent     string          `json:"parentSpanId,omitempty"`
		Name       string          `json:"name"`
		Kind       int             `json:"kind"`
		Start      string          `json:"startTimeUnixNano"`
		End        string          `json:"endTimeUnixNano"`
		Attributes []otlpAttribute `json:"attributes,omitempty"`
		Status     *otlpStatus     `json:"status,omitempty"`
	}
	otlpStatus struct {
		Code    int    `json:"code"`
		Message string `json:"message,omitempty"`
	}
	otlpAttribute struct {
		Key   string    `json:"key"`
		Value otlpValue `json:"value"`
	}
	otlpValue struct {
		String string `json:"stringValue,omitempty"`
		Int    string `json:"intValue,omitempty"`
	}
)

const (
	otlpInternal = 1 // SPAN_KIND_INTERNAL
	otlpError    = 2 // STATUS_CODE_ERROR
)

// otlp returns operations as traces: each is a span, and each of its steps one below it. An operation
// has the same identifiers whenever it is asked for, so that who collects them knows it again.
func otlp(found []oplog.Entry, host string) otlpTraces {
	scope := otlpScope{Spans: []otlpSpan{}}
	scope.Scope.Name = "github.com/gpuckpt/gpuckpt"
	for _, e := range found {
		sum := sha256.Sum256(fmt.Appendf(nil, "%s/%s/%s/%d", host, e.Namespace, e.Container, e.Began.UnixNano()))
		trace, root := hex.EncodeToString(sum[:16]), hex.EncodeToString(sum[16:24])
		span := func(id, parent, name string, from, took time.Duration) otlpSpan {
			began := e.Began.Add(from)
			return otlpSpan{Trace: trace, ID: id, Parent: parent, Name: name, Kind: otlpInternal, Start: nano(began), End: nano(began.Add(took))}
		}
		whole := span(root, "", e.Operation, 0, e.Took)
		whole.Attributes = []otlpAttribute{text("container.id", e.Container), text("containerd.namespace", e.Namespace)}
		if e.Failed != "" {
			whole.Attributes = append(whole.Attributes, text("gpuckpt.failed_step", e.Failed))
			whole.Status = &otlpStatus{Code: otlpError, Message: e.Error}
		}
		if e.Afresh() {
			whole.Name, whole.Attributes = "start afresh", append(whole.Attributes, text("gpuckpt.not_restored", e.Error))
		}
		scope.Spans = append(scope.Spans, whole)
		for i, p := range e.Phases {
			id := sha256.Sum256(fmt.Appendf(nil, "%s/%d", root, i))
			step := span(hex.EncodeToString(id[:8]), root, p.Name, p.Start, p.Took)
			if p.Bytes > 0 {
				step.Attributes = []otlpAttribute{{Key: "gpuckpt.bytes", Value: otlpValue{Int: strconv.FormatUint(p.Bytes, 10)}}}
			}
			scope.Spans = append(scope.Spans, step)
		}
	}
	r := otlpResource{ScopeSpans: []otlpScope{scope}}
	r.Resource.Attributes = []otlpAttribute{text("service.name", "gpuckpt"), text("host.name", host)}
	return otlpTraces{ResourceSpans: []otlpResource{r}}
}

func nano(t time.Time) string { return strconv.FormatInt(t.UnixNano(), 10) }

func text(key, value string) otlpAttribute {
	return otlpAttribute{Key: key, Value: otlpValue{String: value}}
}
