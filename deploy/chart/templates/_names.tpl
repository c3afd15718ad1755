{{- define "gpuckpt.image" -}}
{{- with .Values.image -}}
"{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}"
{{- end -}}
{{- end -}}

{{- /* Labels of an object: of a list of the context and the program's name. */ -}}
{{- define "gpuckpt.labels" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/part-of: gpuckpt
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
{{- end -}}

{{- /* Labels of a pod: of the same. */ -}}
{{- define "gpuckpt.podLabels" -}}
app.kubernetes.io/name: {{ index . 1 }}
{{- with (index . 0).Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The node's configuration. Recipients and keys that the chart has are where gpuckpt install puts them. */ -}}
{{- define "gpuckpt.config" -}}
{{- $config := deepCopy (.Values.config | default dict) -}}
{{- range $name, $value := $config -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $config $name -}}{{- end -}}
{{- end -}}
{{- if .Values.encryption.recipients -}}
{{- $all := append (dig "encryption" "recipients" list $config) "/etc/gpuckpt/recipients" | uniq -}}
{{- $config = mergeOverwrite $config (dict "encryption" (dict "recipients" $all)) -}}
{{- end -}}
{{- with .Values.trust -}}
{{- if and (dig "restore" "keys" list $config) (or .keys .configMaps .secrets) -}}
{{- $_ := set $config.restore "keys" (append $config.restore.keys "/etc/gpuckpt/keys" | uniq) -}}
{{- end -}}
{{- end -}}
{{- include "gpuckpt.whole" $config -}}
{{- if $config -}}{{- toToml $config -}}{{- end -}}
{{- end -}}

{{- /* Helm reads each number as a fraction, of which the node's configuration has none: they are made whole. */ -}}
{{- define "gpuckpt.whole" -}}
{{- range $name, $value := . -}}
{{- if kindIs "map" $value -}}{{- include "gpuckpt.whole" $value -}}{{- end -}}
{{- if kindIs "float64" $value -}}{{- if eq (floor $value) $value -}}{{- $_ := set $ $name (int64 $value) -}}{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Volumes of what gpuckpt install --settings reads: of each its name, its source, and where it is mounted. */ -}}
{{- define "gpuckpt.settings" -}}
{{- $all := list -}}
{{- range $kind := list "keys" "recipients" -}}
{{- $items := list -}}
{{- range $name, $_ := eq $kind "keys" | ternary $.Values.trust.keys $.Values.encryption.recipients -}}
{{- $items = append $items (dict "key" (printf "%s.%s.pub" $kind $name) "path" (printf "%s.pub" $name)) -}}
{{- end -}}
{{- if $items -}}
{{- $all = append $all (dict "name" $kind "path" (printf "%s/chart" $kind) "source" (dict "configMap" (dict "name" "gpuckpt-node" "items" $items))) -}}
{{- end -}}
{{- end -}}
{{- range $i, $name := .Values.trust.configMaps -}}
{{- $all = append $all (dict "name" (printf "keys-configmap-%d" $i) "path" (printf "keys/configmap-%d" $i) "source" (dict "configMap" (dict "name" $name))) -}}
{{- end -}}
{{- range $i, $name := .Values.trust.secrets -}}
{{- $all = append $all (dict "name" (printf "keys-secret-%d" $i) "path" (printf "keys/secret-%d" $i) "source" (dict "secret" (dict "secretName" $name))) -}}
{{- end -}}
{{- range $i, $name := .Values.encryption.secrets -}}
{{- $all = append $all (dict "name" (printf "decryption-%d" $i) "path" (printf "decryption-keys/secret-%d" $i) "source" (dict "secret" (dict "secretName" $name))) -}}
{{- end -}}
{{- if include "gpuckpt.config" . -}}
{{- $all = append $all (dict "name" "config" "path" "config.toml" "subPath" "config.toml" "source" (dict "configMap" (dict "name" "gpuckpt-node"))) -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}
